"""The reported loss and counts: closed forms, and that every wrong report is found."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from fsdp_engine.contract.case import Case, LossMode
from fsdp_engine.contract.model import Model
from fsdp_engine.contract.observation import Observation, Record, TrainRecord
from oracles.evaluation import Evaluator
from oracles.metrics import counts_of, loss_of, num_roundings
from oracles.replay import LocalGradients, replay
from oracles.truth import truth
from properties.checks import metrics
from tests.observed import numerics_of, observed, showing, spoilt
from tests.small_cases import exact_case, small_case

SEQUENCES = [np.array([1.0, 2.0]), np.array([3.0]), np.array([])]
MODES: list[LossMode] = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean"]


@pytest.mark.parametrize(("mode", "wanted"), list(zip(MODES, [2.0, 6.0, 3.0, 2.25], strict=True)))
def test_the_loss_of_each_mode(mode: LossMode, wanted: float) -> None:
    assert loss_of(SEQUENCES, mode) == wanted


def test_sums_are_exact() -> None:
    assert loss_of([np.array([1e16, 1.0]), np.array([1.0])], "token-sum") == 1e16 + 2.0


def test_counts_are_of_all_ranks() -> None:
    case = small_case(shape=(2,), model=Model())
    assert counts_of(case.batches[0]) == {"loss_tokens": 6.0, "sequences": 4.0}


def test_roundings_grow_with_everything_that_is_added() -> None:
    """Two sequences of 5 positions, 3 micro-batches, 2 ranks."""
    batch = small_case(shape=(2,), model=Model()).batches[0]
    assert num_roundings(batch, 3) == 5 * 2 + 3 + 2 + 5


@pytest.mark.parametrize("mode", MODES)
def test_the_loss_is_the_truth(mode: LossMode) -> None:
    """On dyadic data the functional of the per-token losses is the truth bit for bit."""
    case = exact_case(shape=(2,), model=Model())
    case = dataclasses.replace(case, engine=dataclasses.replace(case.engine, loss_mode=mode))
    evaluator = Evaluator(case)
    wanted = truth(evaluator, 0, evaluator.weights).loss
    verdict = metrics.match_oracle(case, showing(reporting(case, loss=wanted)))
    assert verdict.passed
    off = np.nextafter(np.float32(wanted), np.float32(np.inf)) * (1 + 1e-4)
    assert not metrics.match_oracle(case, showing(reporting(case, loss=float(off)))).passed


CASE = small_case(shape=(2,), model=Model(family="mlp"))


def reporting(case: Case, **reported: float) -> Observation:
    """Every rank reports this of its first action; what is not given is right."""
    observation = observed(case)
    for rank in range(case.mesh.world_size):
        observation = spoilt(observation, rank, 0, lambda record: _with(record, case, reported))
    return observation


def _with(record: Record, case: Case, reported: dict[str, float]) -> Record:
    assert isinstance(record, TrainRecord)
    return dataclasses.replace(record, metrics=counts_of(case.batches[0]) | reported)


def replayed(case: Case) -> LocalGradients:
    evaluator = Evaluator(case)
    plans = [((0,), (1,))] * case.mesh.world_size
    return replay(evaluator, 0, plans, numerics_of(case), evaluator.weights)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", ["fp32", "fp64", "fp32/bf16/fp32"])
def test_the_mean_of_the_ranks_totals_passes(mode: LossMode, policy: str) -> None:
    case = small_case(shape=(3,), model=Model(family="embedding"), policy=policy, loss_mode=mode)
    totals = [sum(rank) for rank in replayed(case).losses]
    verdict = metrics.match_oracle(case, showing(reporting(case, loss=sum(totals) / 3)))
    assert verdict.passed
    assert verdict.margin is not None
    assert verdict.margin < 1.0


def test_wrong_losses_are_found() -> None:
    losses = replayed(CASE).losses
    right = sum(map(sum, losses)) / 2
    wrong = {
        "the rank's own": sum(losses[0]),
        "the sum over ranks": right * 2,
        "the last micro-batch": (losses[0][-1] + losses[1][-1]) / 2,
        "the mean over micro-batches": right / 2,
        "not a number": float("nan"),
        "one part in ten thousand": right * 1.0001,
    }
    assert metrics.match_oracle(CASE, showing(reporting(CASE, loss=right))).passed
    for name, loss in wrong.items():
        verdict = metrics.match_oracle(CASE, showing(reporting(CASE, loss=loss)))
        assert verdict.outcome == "fail", name
        assert "metric loss, rank 0" in str(verdict.mismatches[0])


@pytest.mark.parametrize(("name", "count"), [("loss_tokens", 14.0), ("sequences", 2.0)])
def test_wrong_counts_are_found(name: str, count: float) -> None:
    verdict = metrics.match_oracle(CASE, showing(reporting(CASE, **{name: count})))
    assert f"action 0 (train) metric {name}, rank 0: got {count}" in str(verdict.mismatches[0])


def test_ranks_that_differ_are_found() -> None:
    observation = reporting(CASE, throughput=1.0)

    def faster(record: Record) -> Record:
        assert isinstance(record, TrainRecord)
        return dataclasses.replace(record, metrics=record.metrics | {"throughput": 2.0})

    verdict = metrics.match_oracle(CASE, showing(spoilt(observation, 1, 0, faster)))
    assert [str(mismatch) for mismatch in verdict.mismatches] == [
        "action 0 (train) metric throughput, rank 1: got 2.0, should be 1.0 as on rank 0"
    ]


def test_an_engine_without_metrics_is_not_judged() -> None:
    assert metrics.match_oracle(CASE, showing(observed(CASE))).outcome == "not_applicable"

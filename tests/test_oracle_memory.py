"""Bytes of the worked example between micro-batches, and that wrong residency is found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from fsdp_engine.contract.case import Case, Strategy
from fsdp_engine.contract.observation import Record, Residency, TrainRecord
from oracles.memory import Held, predict_held
from properties.checks import residency
from tests.observed import everywhere, numerics_of, observed, showing, worked_case


def held(case: Case) -> tuple[Held, ...]:
    gated = (True,) * len(case.batches[0].ranks[0])
    return predict_held(case, numerics_of(case), gated, deferred=case.engine.deferred)


@pytest.mark.parametrize(
    ("strategy", "dtypes", "reshard", "gradients", "parameters"),
    [
        ("fsdp1", "fp32/bf16/fp32", True, 2940, 0),
        ("fsdp1", "fp32", True, 5848, 0),
        ("fsdp1", "bf16/bf16/fp32", True, 2940, 0),
        ("fsdp1", "fp32/bf16/fp32", False, 2940, 2940),
        ("fsdp1", "fp32", False, 5848, 5848),
        ("fsdp2", "fp32/bf16/fp32", True, 5844, 0),
        ("fsdp2", "fp32/bf16/fp32", False, 5844, 0),
        ("fsdp2", "fp32", True, 5844, 0),
        ("fsdp2", "fp32/bf16/bf16", True, 2922, 0),
        ("fsdp2", "bf16/bf16/fp32", True, 5844, 0),
    ],
)
def test_bytes_kept_under_deferral(
    strategy: Strategy,
    dtypes: str,
    reshard: bool,  # noqa: FBT001  a row of the table
    gradients: int,
    parameters: int,
) -> None:
    case = worked_case(
        strategy=strategy, dtypes=dtypes, reshard=reshard, deferred=True, micro_batches=3
    )
    after_backward = [item for item in held(case) if item.moment == "after_backward"]
    kept = [(item.gradient_bytes, item.parameter_bytes) for item in after_backward]
    assert kept == [(gradients, parameters)] * 2 + [(0, 0)]


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_eager_sync_keeps_nothing_unsharded(strategy: Strategy) -> None:
    for item in held(worked_case(strategy=strategy)):
        assert item.gradient_bytes == 0
        assert item.moment == "after_forward" or item.parameter_bytes == 0


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_zero3_keeps_the_root_after_forward_and_zero2_everything(strategy: Strategy) -> None:
    root = {"embed.weight", "head.weight", "head.bias"}
    zero3 = held(worked_case(strategy=strategy))[0]
    zero2 = held(worked_case(strategy=strategy, reshard=False))[0]
    assert zero3.unsharded == root
    assert len(zero2.unsharded) == len(root) + 2 * 4


CASES = [
    worked_case(strategy=strategy, shape=shape, reshard=reshard, deferred=deferred)
    for strategy in ("fsdp1", "fsdp2")
    for shape in ((2,), (2, 2), (1,))
    for reshard in (True, False)
    for deferred in (True, False)
]


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case.engine.strategy}-{case.mesh.shape}"
)
def test_what_is_predicted_passes(case: Case) -> None:
    run = showing(observed(case))
    assert residency.matches_strategy(case, run).passed
    assert residency.retained_bytes(case, run).passed


def sample(index: int, **changes: object) -> Callable[[Record], Record]:
    def change(record: Record) -> Record:
        assert isinstance(record, TrainRecord)
        samples: list[Residency] = list(record.residency)
        samples[index] = dataclasses.replace(samples[index], **changes)  # type: ignore[arg-type]  # fields by name
        return dataclasses.replace(record, residency=tuple(samples))

    return change


DEFERRED = worked_case(deferred=True)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            sample(1, retained_gradient_bytes=2922),
            "after backward of micro-batch 0 unsharded gradients: got 2922 bytes, should be 5844",
        ),
        (
            sample(3, retained_gradient_bytes=5844),
            "after backward of micro-batch 1 unsharded gradients: got 5844 bytes, should be 0",
        ),
        (
            sample(1, retained_parameter_bytes=2956),
            "after backward of micro-batch 0 gathered parameters: got 2956 bytes, should be 0",
        ),
        (
            sample(2, unsharded=()),
            "after forward of micro-batch 1 embed.weight: got sharded, should be resident in full",
        ),
        (sample(2, micro_batch=0), "samples: got"),
    ],
)
def test_wrong_bytes_are_found(change: Callable[[Record], Record], sentence: str) -> None:
    run = showing(everywhere(observed(DEFERRED), 0, change))
    verdict = residency.retained_bytes(DEFERRED, run)
    assert any(sentence in str(mismatch) for mismatch in verdict.mismatches)


def test_strategies_are_told_apart() -> None:
    zero3, zero2 = worked_case(), worked_case(reshard=False)
    verdict = residency.matches_strategy(zero3, showing(observed(zero2)))
    assert "layers.0.down.bias: got resident in full, should be sharded" in str(
        verdict.mismatches[0]
    )
    verdict = residency.matches_strategy(zero2, showing(observed(zero3)))
    assert "layers.0.down.bias: got sharded, should be resident in full" in str(
        verdict.mismatches[0]
    )


def test_parameters_left_in_full_after_a_step_are_found() -> None:
    names = ("layers.1.up.weight",)
    run = showing(everywhere(observed(DEFERRED), 0, sample(3, unsharded=names)))
    verdict = residency.matches_strategy(DEFERRED, run)
    assert len(verdict.mismatches) == 2

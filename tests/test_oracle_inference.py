"""Inference: closed forms, and that every wrong output is found."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from fsdp_engine.contract.actions import Eval, Infer, Train
from fsdp_engine.contract.batch import Batch, Sequence, Static
from fsdp_engine.contract.case import Case
from fsdp_engine.contract.model import Model
from fsdp_engine.contract.observation import InferRecord, Observation
from fsdp_engine.workload.batches import local_batch
from oracles.arrays import array_of, float64_of
from oracles.evaluation import FLOAT64, Arithmetic, Evaluator
from oracles.inference import replayed_losses, true_losses
from properties.checks import inference
from tests.observed import numerics_of, observed, showing, spoilt
from tests.small_cases import exact_case, small_case

BF16 = Arithmetic(compute="bfloat16", buffers=None, input_cast=True)


def inferring(case: Case) -> Case:
    return dataclasses.replace(case, program=(Infer(),))


def test_losses_by_hand() -> None:
    """Half the squared distance of `head relu(W x)` to the target, token by token."""
    case = exact_case(shape=(2,), model=Model())
    evaluator = Evaluator(case)
    weights = {name: weight.double() for name, weight in evaluator.weights.items()}
    for rank, losses in enumerate(replayed_losses(evaluator, 0, evaluator.weights, FLOAT64)):
        batch = local_batch(case, 0, rank).select([0])
        hidden = torch.relu(batch.inputs["features"].double() @ weights["layers.0.linear.weight"].T)
        off = hidden @ weights["head.weight"].T - batch.targets.double()
        assert torch.equal(losses, (off * off).sum(-1) / 2)


def test_the_truth_is_every_sequence_by_itself() -> None:
    case = small_case(shape=(2,), model=Model(family="qwen2", width=8, vocab=7), policy="fp64")
    evaluator = Evaluator(case)
    together = true_losses(evaluator, 0, evaluator.weights)
    alone = local_batch(case, 0, 1).select([0])
    with evaluator.loaded(evaluator.weights, FLOAT64):
        losses = float64_of(evaluator.losses(alone, training=False))[0]
    assert abs(losses - together[2]).max() < 1e-14


def test_inference_is_without_gradients_and_leaves_train_mode() -> None:
    case = small_case(shape=(2,), model=Model())
    evaluator = Evaluator(case)
    batch = local_batch(case, 0, 0).select([0, 1])
    with evaluator.loaded(evaluator.weights, BF16):
        losses = evaluator.losses(batch, training=False)
        assert not losses.requires_grad
        assert evaluator.evaluate(batch, lambda own, _: own.sum()).gradients
    assert evaluator._module.training


CASE = inferring(small_case(shape=(2,), model=Model(family="embedding"), policy="fp32/bf16/fp32"))


def showing_losses(case: Case) -> Observation:
    evaluator = Evaluator(case)
    own = numerics_of(case)
    arithmetic = Arithmetic(compute=own.compute, buffers=own.buffers, input_cast=own.input_cast)
    observation = observed(case)
    for rank, losses in enumerate(replayed_losses(evaluator, 0, evaluator.weights, arithmetic)):
        observation = spoilt(observation, rank, 0, lambda _, shown=losses: _record(shown))  # type: ignore[misc]  # bound now
    return observation


def _record(losses: Tensor) -> InferRecord:
    return InferRecord(token_losses=array_of(losses), collectives=())


def changed(place: tuple[int, int]) -> Observation:
    """Rank 1's losses with one element moved to its neighbour."""
    evaluator = Evaluator(CASE)
    losses = replayed_losses(evaluator, 0, evaluator.weights, BF16)[1]
    losses[place] = torch.nextafter(losses[place], torch.tensor(float("inf")))
    return spoilt(showing_losses(CASE), 1, 0, lambda _: _record(losses))


def test_the_replay_passes() -> None:
    verdict = inference.matches_oracle(CASE, showing(showing_losses(CASE)))
    assert verdict.passed
    assert verdict.margin is not None


def test_one_bit_of_one_token_is_found() -> None:
    """Lengths on rank 1 are 4 and 5."""
    verdict = inference.matches_oracle(CASE, showing(changed((0, 3))))
    told = str(verdict.mismatches[0])
    assert told.startswith("action 0 (infer) rank 1 token losses of sequence 0, token [3]: got ")


def test_padding_may_be_anything() -> None:
    assert inference.matches_oracle(CASE, showing(changed((0, 4)))).passed


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda losses: losses[:, :-1], "shape: got (2, 4), should be (2, 5)"),
        (lambda losses: losses.double(), "dtype: got float64, should be float32"),
        (lambda losses: losses.roll(1, dims=1), "token "),
        (lambda losses: losses.flip(0), "token "),
        (lambda losses: losses * float("nan"), "token "),
    ],
)
def test_wrong_outputs_are_found(change: object, told: str) -> None:
    assert callable(change)
    evaluator = Evaluator(CASE)
    losses = replayed_losses(evaluator, 0, evaluator.weights, BF16)[1]
    observation = spoilt(showing_losses(CASE), 1, 0, lambda _: _record(change(losses)))
    verdict = inference.matches_oracle(CASE, showing(observation))
    assert any(told in str(mismatch) for mismatch in verdict.mismatches)


def test_losses_of_other_weights_are_found() -> None:
    other = dataclasses.replace(CASE, seed=CASE.seed + 1)
    verdict = inference.matches_oracle(CASE, showing(showing_losses(other)))
    assert verdict.outcome == "fail"


def test_a_program_that_infers_nothing_is_not_judged() -> None:
    case = dataclasses.replace(CASE, program=(Train(),))
    assert inference.matches_oracle(case, showing(observed(case))).outcome == "not_applicable"


def test_padding_is_behind_the_longest_of_the_rank() -> None:
    """Rows are as long as the rank's longest sequence, not the batch's."""
    ranks = ((Sequence(key=0, length=2),), (Sequence(key=1, length=5, loss_tokens=2),))
    case = Case(batches=(Batch(ranks=ranks),), program=(Eval(), Infer()))
    assert case.engine.planning == Static()
    evaluator = Evaluator(case)
    shapes = [
        tuple(losses.shape) for losses in replayed_losses(evaluator, 0, evaluator.weights, FLOAT64)
    ]
    assert shapes == [(1, 2), (1, 5)]

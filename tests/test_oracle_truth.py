"""The truth is the gradient of the global batch, in double throughout, however it is split."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdp_engine.adapters.numerics import fsdp2_numerics
from fsdp_engine.contract.case import LossMode
from fsdp_engine.contract.model import LANGUAGE_FAMILIES, Family, Model
from fsdp_engine.workload.batches import global_batch
from oracles.evaluation import FLOAT64, Evaluator
from oracles.reduction import contributions, mean
from oracles.replay import replay_float64
from oracles.truth import truth
from tests.small_cases import exact_case, small_case

MODES: tuple[LossMode, ...] = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
)


@pytest.mark.parametrize("mode", MODES)
def test_equals_central_differences_bit_for_bit(mode: LossMode) -> None:
    """On dyadic data the loss is a quadratic in each weight, so central differences are exact."""
    model = Model(family="mlp", width=3, hidden=2, vocab=2, bias=True)
    case = exact_case(shape=(4,), model=model)
    case = replace(case, engine=replace(case.engine, loss_mode=mode))
    evaluator = Evaluator(case)
    predicted = truth(evaluator, 0, evaluator.weights).gradients
    step = 2.0**-10
    compared = 0
    for name, weight in evaluator.weights.items():
        for index in range(weight.numel()):
            losses = []
            for moved in (step, -step):
                weights = {key: value.clone() for key, value in evaluator.weights.items()}
                weights[name].view(-1)[index] += moved
                losses.append(truth(evaluator, 0, weights).loss)
            difference = (losses[0] - losses[1]) / (2 * step)
            if name.startswith("layers.0.up") and difference != predicted[name].flat[index]:
                continue  # a kink: some pre-activation is zero, where relu has no derivative
            assert difference == predicted[name].flat[index], (name, index)
            compared += predicted[name].flat[index] != 0.0
    assert compared >= 10


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["mlp", "llama", "qwen2", "mixtral"])
def test_does_not_depend_on_the_split(family: Family, mode: LossMode) -> None:
    """Micro-batches over ranks, in double, agree with the whole batch to double's roundoff."""
    case = small_case(shape=(2,), model=_model(family), loss_mode=mode, micro_batches=3)
    evaluator = Evaluator(case)
    whole = truth(evaluator, 0, evaluator.weights)
    plans = [[[0, 2], [1]], [[1], [2, 0]]]
    parts = replay_float64(evaluator, 0, plans, fsdp2_numerics(case), evaluator.weights)
    assert sum(map(sum, parts.losses)) / 2 == pytest.approx(whole.loss, rel=2.0**-48, abs=0)
    for name, shape in evaluator.shapes.items():
        average = mean(contributions(parts, name, shape), 2)
        scale = np.abs(whole.gradients[name]).max()
        assert np.abs(average - whole.gradients[name]).max() <= 2.0**-44 * scale, name


@pytest.mark.parametrize("family", LANGUAGE_FAMILIES)
def test_nothing_is_computed_below_double(family: Family) -> None:
    """These models cast to float32 inside; under the truth's arithmetic no such tensor appears."""
    case = small_case(shape=(1,), model=_model(family))
    evaluator = Evaluator(case)
    everything = global_batch(case, 0)
    micro_batch = everything.select(range(len(everything)))
    wide: set[torch.dtype] = set()
    with evaluator.loaded(evaluator.weights, FLOAT64), _Watch(wide):
        evaluator.evaluate(micro_batch, lambda losses, _: losses.sum())
    assert wide == {torch.float64}
    mixed: set[torch.dtype] = set()
    only_weights = replace(FLOAT64, throughout=False, buffers=None)
    with evaluator.loaded(evaluator.weights, only_weights), _Watch(mixed):
        evaluator.evaluate(micro_batch, lambda losses, _: losses.sum())
    assert torch.float32 in mixed  # a double model alone is not double throughout


def test_sequences_without_loss_tokens_are_not_counted() -> None:
    case = small_case(
        shape=(2,), model=Model(width=3), loss_mode="seq-mean-token-mean", micro_batches=1
    )
    batch = case.batches[0]
    mute = replace(batch.ranks[1][0], loss_tokens=0)
    half = replace(case, batches=(replace(batch, ranks=(batch.ranks[0], (mute,))),))
    alone = Evaluator(half)
    first = truth(alone, 0, alone.weights)
    means = truth(Evaluator(case), 0, alone.weights)
    assert first.loss != means.loss
    only = replace(half, engine=replace(half.engine, loss_mode="seq-mean-token-sum"))
    summed = truth(Evaluator(only), 0, alone.weights)
    assert summed.loss == first.loss * batch.ranks[0][0].loss_tokens


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Notes the dtypes of all floating tensors that operations return, copies apart."""

    def __init__(self, seen: set[torch.dtype]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._seen = seen

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                self._seen.add(leaf.dtype)
        return result


def _model(family: Family) -> Model:
    if family in LANGUAGE_FAMILIES:
        return Model(family=family, width=8, hidden=8, vocab=7)
    return Model(family=family, width=5, hidden=7, vocab=3, bias=True)

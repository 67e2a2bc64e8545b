"""Bounds on a device that does not repeat itself: what two replays are apart, and no more.

The host stands in for such a device: it is asked to replay twice, and where a test says so its
second replay gives other bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fsdp_engine.adapters.numerics import fsdp2_numerics
from fsdp_engine.contract.actions import Infer, Train
from fsdp_engine.contract.case import Case
from fsdp_engine.contract.model import Model
from fsdp_engine.contract.observation import LocalArray, Observation
from fsdp_engine.contract.protocol import Run
from fsdp_engine.world.pool import WorldPool
from oracles.arrays import array_of, float64_of, tensor_of
from oracles.calibration import WIDENED, loss_spread, mean_spread
from oracles.evaluation import Arithmetic, Evaluation, Evaluator
from oracles.gradients import observed_gradients
from oracles.reduction import magnitude
from oracles.verdict import Verdict
from properties.checks import gradients, inference, metrics, step
from tests.small_cases import small_case
from tests.wrong_reductions import Shown, with_parts

NAME = "layers.0.up.weight"
CASE = replace(
    small_case(shape=(2,), model=Model(family="mlp", units=2, width=4, hidden=6, vocab=5)),
    program=(Train(step=True), Infer(batch=0)),
)
CHECKS: dict[str, Callable[[Case, Run], Verdict]] = {
    "gradients": gradients.match_oracle,
    "norm": step.norm_and_clip,
    "metrics": metrics.match_oracle,
    "inference": inference.matches_oracle,
}


@pytest.fixture(scope="module")
def on_host() -> Iterator[Observation]:
    with WorldPool("reference") as pool:
        yield pool(CASE)


@pytest.fixture
def on_device(on_host: Observation) -> Observation:
    """The same, as from ranks on a device with an arithmetic of its own."""
    return replace(on_host, numerics=replace(on_host.numerics, device="cpu"))


@pytest.fixture
def num_evaluations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts, by whether everything lies elsewhere."""
    counts, evaluate = [0, 0], Evaluator.evaluate

    def counted(self: Evaluator, *arguments: Any) -> Evaluation:
        counts[self._ballast is not None] += 1
        return evaluate(self, *arguments)

    monkeypatch.setattr(Evaluator, "evaluate", counted)
    return counts


@pytest.fixture
def unsteady(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The second replay is off by an ulp in one element, in every loss and every token's loss.

    The list has by how much that element was off each time.
    """
    evaluate, losses = Evaluator.evaluate, Evaluator.losses
    apart: list[float] = []

    def unsteady(self: Evaluator, *arguments: Any) -> Evaluation:
        found = evaluate(self, *arguments)
        if self._ballast is None:
            return found
        elements = found.gradients[NAME].view(-1)
        before = float(elements[3])
        elements[3] = torch.nextafter(elements[3], torch.tensor(torch.inf))
        apart.append(float(elements[3]) - before)
        return replace(found, total=math.nextafter(found.total, math.inf))

    def unsteady_losses(self: Evaluator, *arguments: Any, training: bool) -> torch.Tensor:
        found = losses(self, *arguments, training=training)
        return found if self._ballast is None else torch.nextafter(found, torch.tensor(torch.inf))

    monkeypatch.setattr(Evaluator, "evaluate", unsteady)
    monkeypatch.setattr(Evaluator, "losses", unsteady_losses)
    return apart


@pytest.mark.parametrize("name", CHECKS)
def test_a_device_that_repeats_itself_keeps_every_bound(
    on_host: Observation, on_device: Observation, name: str
) -> None:
    wanted = CHECKS[name](CASE, Shown(on_host))
    assert wanted.passed
    assert CHECKS[name](CASE, Shown(on_device)) == wanted
    assert wanted.notes == ()


def test_the_host_is_replayed_once(
    on_host: Observation, on_device: Observation, num_evaluations: list[int]
) -> None:
    assert gradients.match_oracle(CASE, Shown(on_host)).passed
    once = num_evaluations[0]
    assert num_evaluations[1] == 0
    assert gradients.match_oracle(CASE, Shown(on_device)).passed
    local = 2 * len(CASE.batches[0].ranks)  # two micro-batches on each
    assert num_evaluations == [2 * once, local]


def test_the_bound_grows_by_precisely_the_spread(
    on_host: Observation, on_device: Observation, unsteady: list[float]
) -> None:
    own, widened = (
        next(observed_gradients(Evaluator(CASE), shown)).prediction
        for shown in (on_host, on_device)
    )
    assert own is not None
    assert widened is not None
    assert len(unsteady) == 4  # two micro-batches on two ranks, and a mean over two ranks
    for name in own.shapes:
        spread = sum(unsteady) / 2 if name == NAME else 0.0
        assert (own.spread(name), widened.spread(name)) == (0.0, spread)
        sizes = magnitude(own.terms(name), 2)
        grown = (sizes + spread) * own.allowance.relative + (own.allowance.absolute + spread)
        assert np.array_equal(widened.allowed(name), grown)
        assert (widened.candidates(name) is None) == (name == NAME)


@pytest.mark.usefixtures("unsteady")
@pytest.mark.parametrize("name", CHECKS)
def test_a_widened_verdict_is_calibrated_and_noted(
    on_host: Observation, on_device: Observation, name: str
) -> None:
    assert CHECKS[name](CASE, Shown(on_host)).notes == ()
    verdict = CHECKS[name](CASE, Shown(on_device))
    assert verdict.passed
    assert verdict.notes == (WIDENED,)


def _off(observation: Observation, by: float) -> Observation:
    """The engine's gradient wrong by so much in one element."""

    def spoil(_: int, part: LocalArray) -> LocalArray:
        if part.name != NAME or part.data is None:
            return part
        tensor = tensor_of(part.data)
        tensor.view(-1)[0] += by
        return replace(part, data=array_of(tensor))

    return with_parts(observation, spoil)


@pytest.mark.usefixtures("unsteady")
def test_what_is_larger_than_the_spread_is_still_found(on_device: Observation) -> None:
    prediction = next(observed_gradients(Evaluator(CASE), on_device)).prediction
    assert prediction is not None
    within = 0.5 * prediction.spread(NAME)
    beyond = 4.0 * float(prediction.allowed(NAME).max())
    host = replace(on_device, numerics=replace(on_device.numerics, device=None))
    assert gradients.match_oracle(CASE, Shown(_off(host, within))).outcome == "fail"
    passed = gradients.match_oracle(CASE, Shown(_off(on_device, within)))
    assert passed.passed
    assert passed.margin_kind == "calibrated"
    failed = gradients.match_oracle(CASE, Shown(_off(on_device, beyond)))
    assert failed.outcome == "fail"
    assert failed.notes == (WIDENED,)
    (told,) = [str(one) for one in failed.mismatches if NAME in one.where and WIDENED in str(one)]
    assert "by up to" in told


def test_spreads_of_absent_and_strange_gradients() -> None:
    """Absent is zero; what is not finite is judged by another rule and widens nothing."""
    one, other = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5])
    strange = torch.tensor([float("nan"), float("inf")])
    assert mean_spread([[{"w": one}], [{"w": one}]], [[{"w": other}], [{}]]) == {"w": 1.25}
    assert mean_spread([[{"w": one}]], [[{"w": strange}]]) == {}
    assert mean_spread([[{}]], [[{}]]) == {}
    assert loss_spread([[1.0, 2.0], [3.0]], [[1.5, 1.75], [3.0]]) == {0: 0.75}


@pytest.mark.parametrize("family", ["mlp", "llama", "mixtral"])
def test_a_replay_at_other_addresses_is_the_same_replay(family: Any) -> None:
    """Parameters are views of one piece of memory then, and not where they are on their own."""
    case = small_case(shape=(1,), model=Model(family=family, units=1))
    evaluator = Evaluator(case)
    arithmetic = Arithmetic.of(replace(fsdp2_numerics(case), device="cpu"))
    with evaluator.loaded(evaluator.weights, arithmetic):
        alone = {name: p.data_ptr() for name, p in evaluator._parameters.items()}
    with evaluator.loaded(evaluator.weights, replace(arithmetic, elsewhere=True)):
        for name, parameter in evaluator._parameters.items():
            assert np.array_equal(float64_of(parameter), float64_of(evaluator.weights[name]))
        pointers = {name: p.data_ptr() for name, p in evaluator._parameters.items()}
        storages = {p.untyped_storage().data_ptr() for p in evaluator._parameters.values()}
    assert len(storages) == 1
    assert all(pointers[name] != alone[name] for name in alone)
    assert [*pointers] == sorted(pointers, key=lambda name: pointers[name], reverse=True)

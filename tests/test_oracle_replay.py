"""Replay: the declared dtypes decide every bit, and nothing is carried over between calls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from fsdp_engine.adapters.numerics import fsdp1_numerics, fsdp2_numerics
from fsdp_engine.contract.case import Case
from fsdp_engine.contract.model import Family, Model
from fsdp_engine.contract.observation import Numerics
from fsdp_engine.world.pool import WorldPool
from oracles.arrays import same_bits
from oracles.evaluation import FLOAT64, Evaluator
from oracles.gradients import observed_gradients
from oracles.prediction import predict
from oracles.records import train_actions
from oracles.replay import LocalGradients, replay, replay_float32, replay_float64
from tests.small_cases import small_case

PLANS = [[[0], [1], [2]], [[0], [1], [2]]]
MODEL = Model(family="mlp", width=5, hidden=7, vocab=3, bias=True, buffers=True)


def a_case(policy: str, family: Family = "mlp") -> Case:
    model = MODEL if family == "mlp" else Model(family=family, width=32, hidden=8, vocab=7)
    return small_case(shape=(2,), model=model, policy=policy, micro_batches=3, deferred=True)


def same(one: LocalGradients, other: LocalGradients) -> bool:
    return all(
        same_bits(gradient, b[t][name])
        for a, b in zip(one.reduced, other.reduced, strict=True)
        for t, gradients in enumerate(a)
        for name, gradient in gradients.items()
    )


def test_calls_do_not_disturb_each_other() -> None:
    case = a_case("fp32/bf16/fp32")
    evaluator = Evaluator(case)
    declared = fsdp2_numerics(case)
    kept = {name: weight.clone() for name, weight in evaluator.weights.items()}
    threads, default = torch.get_num_threads(), torch.get_default_dtype()
    first = replay(evaluator, 0, PLANS, declared, evaluator.weights)
    replay_float64(evaluator, 0, PLANS, declared, evaluator.weights)
    replay_float32(evaluator, 0, PLANS, declared, evaluator.weights)
    with pytest.raises(ZeroDivisionError), evaluator.loaded(evaluator.weights, FLOAT64):
        raise ZeroDivisionError
    assert same(first, replay(evaluator, 0, PLANS, declared, evaluator.weights))
    assert same(first, replay(Evaluator(case), 0, PLANS, declared, evaluator.weights))
    assert all(same_bits(kept[name], weight) for name, weight in evaluator.weights.items())
    assert (threads, default) == (torch.get_num_threads(), torch.get_default_dtype())


def test_deferred_gradients_are_added_in_place_with_one_rounding() -> None:
    case = a_case("fp32/bf16/fp32")
    evaluator = Evaluator(case)
    for declared in (fsdp1_numerics(case), fsdp2_numerics(case)):
        deferred = replay(evaluator, 0, PLANS, declared, evaluator.weights)
        eager = replay(evaluator, 0, PLANS, replace(declared, deferred=False), evaluator.weights)
        dtype = torch.bfloat16 if declared.semantics == "fsdp1" else torch.float32
        for rank in range(2):
            assert len(deferred.reduced[rank]) == 1
            assert len(eager.reduced[rank]) == 3
            for name, total in deferred.reduced[rank][0].items():
                parts = [step[name] for step in eager.reduced[rank]]
                assert {part.dtype for part in parts} == {torch.bfloat16}
                expected = (parts[0].to(dtype) + parts[1].to(dtype)) + parts[2].to(dtype)
                assert same_bits(total, expected)


def test_a_finer_addend_is_not_rounded_before_it_is_added() -> None:
    case = a_case("fp32")
    declared = replace(fsdp2_numerics(case), local_accumulate="bfloat16", reduce="bfloat16")
    evaluator = Evaluator(case)
    deferred = replay(evaluator, 0, PLANS, declared, evaluator.weights)
    eager = replay(evaluator, 0, PLANS, replace(declared, deferred=False), evaluator.weights)
    twice = 0
    for name, total in deferred.reduced[0][0].items():
        first, second, third = (step[name] for step in eager.reduced[0])
        step = (first.bfloat16().float() + second).bfloat16()
        assert same_bits(total, (step.float() + third).bfloat16())
        twice += int((total != first.bfloat16() + second.bfloat16() + third.bfloat16()).sum())
    assert twice > 0


def test_float32_and_float64_see_the_same_function() -> None:
    case = a_case("bf16/bf16/fp32")
    evaluator, declared = Evaluator(case), fsdp2_numerics(case)
    wide = replay_float64(evaluator, 0, PLANS, declared, evaluator.weights)
    single = replay_float32(evaluator, 0, PLANS, declared, evaluator.weights)
    for rank in range(2):
        for name, gradient in wide.reduced[rank][0].items():
            assert gradient.dtype == torch.float64
            scale = float(gradient.abs().max())
            assert float((single.reduced[rank][0][name] - gradient).abs().max()) < 2e-6 * scale


@pytest.fixture(scope="module")
def pool() -> Iterator[WorldPool]:
    with WorldPool("torch_fsdp2") as world:
        yield world


@pytest.mark.parametrize("policy", ["fp32/bf16/fp32", "bf16/bf16/fp32", "fp64"])
@pytest.mark.parametrize("family", ["mlp", "llama"])
def test_every_rule_of_the_replay_matters(pool: WorldPool, family: Family, policy: str) -> None:
    """Real ranks agree bit for bit with the declared rules and with no others."""
    case = a_case(policy, family)
    observation = pool(case)
    declared = observation.numerics
    assert _wrong_elements(case, pool, declared) == 0
    others: list[Numerics] = []
    if policy != "fp64":
        others = [
            replace(declared, compute="float32"),
            replace(declared, local_accumulate="bfloat16"),
        ]
        if family == "llama":
            others.append(replace(declared, buffers="bfloat16"))  # rotary frequencies
    for other in others:
        assert _wrong_elements(case, pool, other) > 0


def _wrong_elements(case: Case, pool: WorldPool, declared: Numerics) -> int:
    """Elements that differ from the emulated reduction of a replay under other numerics."""
    observation = pool(case)
    (shown,) = observed_gradients(Evaluator(case), observation)
    (action,) = train_actions(case, observation)
    evaluator = Evaluator(case)
    prediction = predict(evaluator, action, declared, evaluator.weights)
    wrong = 0
    for name in prediction.shapes:
        candidates = prediction.candidates(name)
        assert candidates is not None
        wrong += int(np.sum(candidates[0].double().numpy() != shown.got(name)))
    return wrong

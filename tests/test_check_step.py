"""The checks of the step on real ranks: a clean engine passes, whatever is spoilt is named."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from fsdp_engine.contract.actions import Poison, Train
from fsdp_engine.contract.case import DTYPE_POLICIES, Case
from fsdp_engine.contract.observation import Observation
from fsdp_engine.world.pool import WorldPool
from oracles.verdict import Verdict
from properties.catalog import Check
from properties.checks.non_finite import changes_nothing
from properties.checks.step import norm_and_clip, optimizer_step
from tests.observed import Answers, everywhere, spoilt
from tests.spoilt_steps import CASE, CHECKS, LAST, SPOILT, Change, of, scaled


@pytest.fixture(scope="module")
def pool() -> Iterator[WorldPool]:
    with WorldPool("reference") as world:
        yield world


@pytest.fixture(scope="module")
def observation(pool: WorldPool) -> Observation:
    return pool(CASE)


@pytest.fixture(scope="module")
def clean(pool: WorldPool) -> Observation:
    return pool(without_poison(CASE))


def without_poison(case: Case) -> Case:
    kept = tuple(action for action in case.program if not isinstance(action, Poison))
    return replace(case, program=kept)


def judged(check: Check, shown: Observation, clean: Observation) -> Verdict:
    return check(CASE, Answers(observe=lambda case: shown if case == CASE else clean))


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize("policy", ["fp32", "fp64", "bf16/bf16/fp32"])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_clean_ranks_pass(pool: WorldPool, strategy: Any, policy: str, kind: Any) -> None:
    case = replace(
        CASE,
        dtypes=DTYPE_POLICIES[policy],
        engine=replace(CASE.engine, strategy=strategy),
        optimizer=replace(CASE.optimizer, kind=kind, warmup_steps=0),
    )
    run = Answers(observe=functools.cache(pool))
    for check in CHECKS:
        verdict = check(case, run)
        assert verdict.passed, verdict
        assert verdict.margin is not None
        assert verdict.margin <= 1.0


@pytest.mark.parametrize(
    ("check", "index", "change", "said"),
    [item[1:] for item in SPOILT],
    ids=[item[0] for item in SPOILT],
)
def test_what_is_spoilt_is_found(  # noqa: PLR0917  fixtures and parameters
    observation: Observation,
    clean: Observation,
    check: Check,
    index: int,
    change: Change,
    said: str,
) -> None:
    verdict = judged(check, everywhere(observation, index, change), clean)
    assert verdict.outcome == "fail"
    assert any(said in str(mismatch) for mismatch in verdict.mismatches), verdict.mismatches


def test_nothing_spoilt_passes(observation: Observation, clean: Observation) -> None:
    for check in CHECKS:
        assert judged(check, observation, clean).passed


def test_one_rank_that_differs_is_found(observation: Observation, clean: Observation) -> None:
    def nearly(record: Any) -> Any:
        return replace(record, norm=math.nextafter(record.norm, 9.0))

    verdict = judged(norm_and_clip, spoilt(observation, 1, 0, nearly), clean)
    assert "norm, rank 1" in str(verdict.mismatches[0])
    assert "as on rank 0" in str(verdict.mismatches[0])


def test_without_optimizer_state_the_first_step_is_judged(
    observation: Observation, clean: Observation
) -> None:
    """An engine that cannot tell its state: its first step is known, later ones are not."""

    def blinded(record: Any) -> Any:
        return replace(record, optimizer_state={})

    blind = observation
    for index in range(len(CASE.program)):
        blind = everywhere(blind, index, blinded)
    assert judged(optimizer_step, blind, clean).passed
    change = of("parameters", lambda part: scaled(part, 1 + 1e-5), only="up.weight")
    assert judged(optimizer_step, everywhere(blind, 0, change), clean).outcome == "fail"


def test_other_rates_after_a_poisoned_action_are_no_difference(pool: WorldPool) -> None:
    """Under a cosine the clean program steps with other rates: gradients and norm stay judged."""
    optimizer = replace(CASE.optimizer, schedule="cosine", total_steps=5, min_lr_ratio=0.25)
    case = replace(CASE, optimizer=optimizer)
    assert changes_nothing(case, pool).passed
    shown = pool(case)
    rest = pool(without_poison(case))
    change = of("gradients", lambda part: scaled(part, 1 + 2.0**-23))
    wrong = everywhere(shown, LAST, change)
    run = Answers(observe=lambda asked: wrong if asked == case else rest)
    assert changes_nothing(case, run).outcome == "fail"


def test_programs_without_a_step_are_not_judged(pool: WorldPool) -> None:
    case = replace(CASE, program=(Train(),))
    for check in CHECKS:
        assert check(case, pool).outcome == "not_applicable"

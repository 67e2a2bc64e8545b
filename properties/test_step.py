"""The optimizer step: norm, clipping, update and schedule, and a step that is not taken."""

from __future__ import annotations

from fsdp_engine.contract.case import Case
from properties.checks import non_finite, step
from properties.judge import Judge
from properties.strategies.cases import poisoned_cases, stepping_cases
from properties.strategies.regions import many_ranks, two_ranks
from properties.suite import over_rows


@over_rows(stepping_cases, times=2)
def test_norm_and_clip(case: Case, judge: Judge) -> None:
    judge(step.norm_and_clip, case)


@over_rows(stepping_cases)
def test_optimizer_step(case: Case, judge: Judge) -> None:
    judge(step.optimizer_step, case)


@over_rows(poisoned_cases, where=many_ranks)
def test_non_finite_changes_nothing(case: Case, judge: Judge) -> None:
    judge(non_finite.changes_nothing, case)


@over_rows(stepping_cases, where=two_ranks)
def test_learning_rates(case: Case, judge: Judge) -> None:
    judge(step.learning_rates, case)

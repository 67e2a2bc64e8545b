"""Which parameters train: frozen, unfrozen and unused ones, and those that are written back."""

from __future__ import annotations

from fsdp_engine.contract.case import Case
from properties.checks import freezing
from properties.judge import Judge
from properties.strategies.cases import freezing_cases, restoring_cases, unused_cases
from properties.strategies.regions import many_ranks, plain_on_many_ranks, sometimes_used
from properties.suite import over_rows


@over_rows(freezing_cases, where=plain_on_many_ranks, times=1.5)
def test_frozen_match_oracle(case: Case, judge: Judge) -> None:
    judge(freezing.frozen_match_oracle, case)


@over_rows(unused_cases, where=sometimes_used)
def test_unused_stay(case: Case, judge: Judge) -> None:
    judge(freezing.unused_stay, case)


@over_rows(restoring_cases, where=many_ranks)
def test_restore_takes_effect(case: Case, judge: Judge) -> None:
    judge(freezing.restore_takes_effect, case)

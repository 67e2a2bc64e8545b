"""Exported weights: complete, exact, the same however staged, without side effects."""

from __future__ import annotations

from fsdp_engine.contract.case import Case
from properties.checks import export
from properties.judge import Judge
from properties.strategies.cases import adapted_cases, exporting_cases
from properties.strategies.regions import can_have_adapter, plain_on_many_ranks
from properties.suite import over_rows


@over_rows(exporting_cases, where=plain_on_many_ranks)
def test_match_oracle(case: Case, judge: Judge) -> None:
    judge(export.match_oracle, case)


@over_rows(adapted_cases, where=can_have_adapter, given=False)
def test_adapted_match_oracle(case: Case, judge: Judge) -> None:
    judge(export.match_oracle, case)


@over_rows(exporting_cases, where=plain_on_many_ranks)
def test_staged_equals_unstaged(case: Case, judge: Judge) -> None:
    judge(export.staged_equals_unstaged, case)


@over_rows(exporting_cases, where=plain_on_many_ranks)
def test_changes_nothing(case: Case, judge: Judge) -> None:
    judge(export.changes_nothing, case)


@over_rows(adapted_cases, where=can_have_adapter, given=False, times=1 / 3)
def test_adapted_changes_nothing(case: Case, judge: Judge) -> None:
    judge(export.changes_nothing, case)

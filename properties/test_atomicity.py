"""A batch that an exception ends leaves nothing behind."""

from __future__ import annotations

from fsdp_engine.contract.case import Case
from properties.checks import atomicity
from properties.judge import Judge
from properties.strategies.cases import interrupted_cases
from properties.strategies.regions import many_ranks
from properties.suite import over_rows


@over_rows(interrupted_cases, where=many_ranks)
def test_changes_nothing(case: Case, judge: Judge) -> None:
    judge(atomicity.changes_nothing, case)

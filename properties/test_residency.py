"""What a rank holds between the passes is what its strategy says."""

from __future__ import annotations

from fsdp_engine.contract.case import Case
from properties.checks import residency
from properties.judge import Judge
from properties.strategies.cases import cases
from properties.strategies.regions import deferring, many_ranks
from properties.suite import over_rows


@over_rows(cases, where=many_ranks)
def test_matches_strategy(case: Case, judge: Judge) -> None:
    judge(residency.matches_strategy, case)


@over_rows(cases, where=deferring)
def test_retained_bytes(case: Case, judge: Judge) -> None:
    judge(residency.retained_bytes, case)

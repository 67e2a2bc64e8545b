"""The gradient belongs to the batch, however its sequences are dealt out."""

from __future__ import annotations

from fsdp_engine.contract.case import Case
from properties.checks import split
from properties.judge import Judge
from properties.strategies.cases import cases, exact_cases
from properties.strategies.regions import can_be_exact, many_ranks
from properties.suite import over_rows


@over_rows(cases, where=many_ranks)
def test_partition_invariance(case: Case, judge: Judge) -> None:
    judge(split.partition_invariance, case)


@over_rows(exact_cases, where=can_be_exact, given=False)
def test_partition_invariance_exactly(case: Case, judge: Judge) -> None:
    judge(split.partition_invariance, case)

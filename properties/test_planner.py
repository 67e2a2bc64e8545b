"""Micro-batches are a partition of the rank's batch, equally many on all ranks."""

from __future__ import annotations

from fsdp_engine.contract.case import Case
from properties.checks import planner
from properties.judge import Judge
from properties.strategies.cases import cases, grouped_cases
from properties.strategies.regions import many_ranks
from properties.suite import over_rows


@over_rows(cases, where=many_ranks)
def test_is_exact_partition(case: Case, judge: Judge) -> None:
    judge(planner.is_exact_partition, case)


@over_rows(grouped_cases, where=many_ranks, given=False)
def test_is_exact_partition_of_groups(case: Case, judge: Judge) -> None:
    judge(planner.is_exact_partition, case)

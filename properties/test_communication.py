"""Collectives: every unit is reduced, groups agree, nothing is sent twice."""

from __future__ import annotations

from fsdp_engine.contract.case import Case
from properties.checks import communication
from properties.judge import Judge
from properties.strategies.cases import cases, stepping_cases
from properties.strategies.regions import many_ranks
from properties.suite import over_rows


@over_rows(cases, where=many_ranks)
def test_reduces_every_unit(case: Case, judge: Judge) -> None:
    judge(communication.reduces_every_unit, case)


@over_rows(stepping_cases, where=many_ranks)
def test_same_in_every_group(case: Case, judge: Judge) -> None:
    judge(communication.same_in_every_group, case)


@over_rows(cases, where=many_ranks)
def test_matches_schedule(case: Case, judge: Judge) -> None:
    judge(communication.matches_schedule, case)

"""Sharding, splitting and precision leave the gradient what it is."""

from __future__ import annotations

from fsdp_engine.contract.case import Case
from properties.checks import exact, gradients
from properties.judge import Judge
from properties.strategies.cases import cases, exact_cases, stepping_cases
from properties.strategies.regions import can_be_exact, many_ranks, replicated
from properties.suite import over_rows


@over_rows(cases, main=True)
def test_match_oracle(case: Case, judge: Judge) -> None:
    judge(gradients.match_oracle, case)


@over_rows(stepping_cases, where=many_ranks, given=False)
def test_match_oracle_after_steps(case: Case, judge: Judge) -> None:
    judge(gradients.match_oracle, case)


@over_rows(stepping_cases, where=replicated)
def test_replicas_agree(case: Case, judge: Judge) -> None:
    judge(gradients.replicas_agree, case)


@over_rows(exact_cases, where=can_be_exact, times=2)
def test_match_truth_bitwise(case: Case, judge: Judge) -> None:
    judge(exact.match_truth_bitwise, case)

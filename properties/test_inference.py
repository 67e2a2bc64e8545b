"""Inference is right, and training does not notice it."""

from __future__ import annotations

from fsdp_engine.contract.case import Case
from properties.checks import inference
from properties.judge import Judge
from properties.strategies.cases import inferring_cases
from properties.strategies.regions import many_ranks
from properties.suite import over_rows


@over_rows(inferring_cases, where=many_ranks)
def test_changes_nothing(case: Case, judge: Judge) -> None:
    judge(inference.changes_nothing, case)


@over_rows(inferring_cases, where=many_ranks)
def test_matches_oracle(case: Case, judge: Judge) -> None:
    judge(inference.matches_oracle, case)

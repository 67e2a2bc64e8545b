"""What the engine reports of a batch is true."""

from __future__ import annotations

from fsdp_engine.contract.case import Case
from properties.checks import metrics
from properties.judge import Judge
from properties.strategies.cases import cases
from properties.strategies.regions import many_ranks
from properties.suite import over_rows


@over_rows(cases, where=many_ranks)
def test_match_oracle(case: Case, judge: Judge) -> None:
    judge(metrics.match_oracle, case)

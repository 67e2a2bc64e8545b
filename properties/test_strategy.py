"""The mesh and the strategy an engine chooses, for every question there is."""

from __future__ import annotations

from fsdp_engine.contract.case import Case
from properties.checks import strategy
from properties.judge import Judge
from properties.strategies.tables import one_case
from properties.suite import over_table


@over_table(one_case)
def test_mesh_is_total(case: Case, judge: Judge) -> None:
    judge(strategy.mesh_is_total, case)


@over_table(one_case)
def test_strategy_is_total(case: Case, judge: Judge) -> None:
    judge(strategy.strategy_is_total, case)

"""The mesh and the strategy an engine chooses, for every question there is."""

from __future__ import annotations

from fsdp_engine.contract.case import Case
from properties.checks import strategy
from properties.judge import Judge
from properties.strategies.cases import cases
from properties.strategies.regions import simplest_model
from properties.suite import over_rows


@over_rows(cases, where=simplest_model)
def test_mesh_is_total(case: Case, judge: Judge) -> None:
    judge(strategy.mesh_is_total, case)


@over_rows(cases, where=simplest_model)
def test_strategy_is_total(case: Case, judge: Judge) -> None:
    judge(strategy.strategy_is_total, case)

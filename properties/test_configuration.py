"""The engine's configuration: one set of defaults, nothing illegal let through, nothing idle."""

from __future__ import annotations

from fsdp_engine.contract.case import Case
from properties.checks import configuration
from properties.judge import Judge
from properties.strategies.tables import changed_cases, illegal_configurations, one_case
from properties.suite import over_table


@over_table(one_case)
def test_entry_points_agree(case: Case, judge: Judge) -> None:
    judge(configuration.entry_points_agree, case)


@over_table(one_case)
def test_every_field_is_probed(case: Case, judge: Judge) -> None:
    judge(configuration.every_field_is_probed, case)


@over_table(illegal_configurations, overrides=True)
def test_illegal_is_refused(case: Case, judge: Judge) -> None:
    judge(configuration.illegal_is_refused, case)


@over_table(changed_cases, overrides=True)
def test_field_is_observable(case: Case, judge: Judge) -> None:
    judge(configuration.field_is_observable, case)

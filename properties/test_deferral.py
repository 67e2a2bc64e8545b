"""Deferring the gradient sync to the last micro-batch changes no gradient."""

from __future__ import annotations

from fsdp_engine.contract.case import Case
from properties.checks import deferral
from properties.judge import Judge
from properties.strategies.cases import cases, exact_cases
from properties.strategies.regions import deferring, exactly_deferring
from properties.suite import over_rows


@over_rows(cases, where=deferring)
def test_deferred_equals_eager(case: Case, judge: Judge) -> None:
    judge(deferral.deferred_equals_eager, case)


@over_rows(exact_cases, where=exactly_deferring, given=False)
def test_deferred_equals_eager_exactly(case: Case, judge: Judge) -> None:
    judge(deferral.deferred_equals_eager, case)

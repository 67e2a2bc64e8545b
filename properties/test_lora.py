"""Adapters: sent apart or merged they give the same model, and they can be switched off."""

from __future__ import annotations

from fsdp_engine.contract.case import Case
from properties.checks import lora
from properties.judge import Judge
from properties.strategies.cases import switching_cases, syncing_cases
from properties.strategies.regions import can_have_adapter
from properties.suite import over_rows


@over_rows(syncing_cases, where=can_have_adapter)
def test_two_phase_equals_merged(case: Case, judge: Judge) -> None:
    judge(lora.two_phase_equals_merged, case)


@over_rows(switching_cases, where=can_have_adapter)
def test_switch_matches_oracle(case: Case, judge: Judge) -> None:
    judge(lora.switch_matches_oracle, case)

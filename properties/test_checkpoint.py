"""Checkpoints: gone back to bit for bit, on any mesh, without a trace, and whole or refused."""

from __future__ import annotations

from fsdp_engine.contract.case import Case
from properties.checks import checkpoint
from properties.judge import Judge
from properties.strategies.cases import (
    rejecting_cases,
    resharding_cases,
    resuming_cases,
    saving_cases,
)
from properties.strategies.regions import saved_on_few_ranks, saved_on_many_ranks
from properties.suite import over_rows


@over_rows(resuming_cases, where=saved_on_many_ranks)
def test_resume_equals_uninterrupted(case: Case, judge: Judge) -> None:
    judge(checkpoint.resume_equals_uninterrupted, case)


@over_rows(resharding_cases, where=saved_on_many_ranks)
def test_resharded_goes_on(case: Case, judge: Judge) -> None:
    judge(checkpoint.resharded_goes_on, case)


@over_rows(saving_cases, where=saved_on_few_ranks)
def test_save_changes_nothing(case: Case, judge: Judge) -> None:
    judge(checkpoint.save_changes_nothing, case)


@over_rows(rejecting_cases, where=saved_on_many_ranks)
def test_damaged_is_refused(case: Case, judge: Judge) -> None:
    judge(checkpoint.damaged_is_refused, case)

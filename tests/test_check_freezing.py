"""Frozen, unfrozen, unused and restored parameters: every one that moves or stays wrongly."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from fsdp_engine.contract.actions import (
    Freeze,
    Restore,
    Train,
    Unfreeze,
)
from fsdp_engine.contract.case import Case
from fsdp_engine.contract.observation import (
    Observation,
)
from properties.checks import freezing
from tests.altered import NAME, STEP, changed, moving, programmed, told, with_moments
from tests.observed import Answers, everywhere, observed, showing

UNUSED = programmed(STEP, Train(step=True), optional="parameter")
EXTRA = "layers.1.extra"


def unused_case(*, gated: bool) -> Case:
    batches = tuple(
        dataclasses.replace(
            batch,
            ranks=tuple(
                tuple(dataclasses.replace(one, gated=gated) for one in rank) for rank in batch.ranks
            ),
        )
        for batch in UNUSED.batches
    )
    return dataclasses.replace(UNUSED, batches=batches)


def with_gradients(case: Case, name: str) -> Observation:
    """Every parameter has a gradient, but for this one."""
    parts = tuple(
        dataclasses.replace(part, data=None) if part.name == name else part
        for part in observed(case).ranks[0].initial
    )
    shown = observed(case)
    for index in range(len(case.program)):
        shown = everywhere(shown, index, changed(gradients=parts, clipped=parts))
    return shown


def test_an_unused_parameter_that_stays_passes() -> None:
    case = unused_case(gated=False)
    assert freezing.unused_stay(case, showing(with_gradients(case, EXTRA))).passed


def test_an_unused_parameter_that_moves_is_found() -> None:
    case = unused_case(gated=False)
    shown = everywhere(with_gradients(case, EXTRA), 1, moving(EXTRA))
    verdict = freezing.unused_stay(case, showing(shown))
    assert f"action 1 (train) unused parameter {EXTRA}[0]" in told(verdict)[0]


def test_a_gradient_of_an_unused_parameter_is_found() -> None:
    case = unused_case(gated=False)
    verdict = freezing.unused_stay(case, showing(with_gradients(case, "head.weight")))
    assert (
        f"action 0 (train) rank 0 gradient {EXTRA}: got present, should be absent"
        in told(verdict)[0]
    )


def test_moments_of_an_unused_parameter_are_found() -> None:
    case = unused_case(gated=False)
    shown = with_moments(case, with_gradients(case, EXTRA), 0, 1.0)
    verdict = freezing.unused_stay(case, showing(with_moments(case, shown, 1, 2.0)))
    assert any(f"action 1 (train) unused exp_avg {EXTRA}[0]" in line for line in told(verdict))


def test_used_parameters_are_not_judged() -> None:
    case = unused_case(gated=True)
    assert freezing.unused_stay(case, Answers()).outcome == "not_applicable"


@pytest.mark.parametrize(("gated", "name"), [(True, "layers.1.other"), (False, "layers.1.extra")])
def test_of_two_parts_the_other_is_unused(name: str, *, gated: bool) -> None:
    case = unused_case(gated=gated)
    case = dataclasses.replace(case, model=dataclasses.replace(case.model, optional="either"))
    assert freezing.unused_stay(case, showing(with_gradients(case, name))).passed
    verdict = freezing.unused_stay(case, showing(with_gradients(case, "head.weight")))
    assert all(name in line for line in told(verdict))


def test_a_whole_unit_may_be_unused() -> None:
    case = unused_case(gated=False)
    case = dataclasses.replace(case, model=dataclasses.replace(case.model, optional="unit"))
    verdict = freezing.unused_stay(case, showing(with_gradients(case, "head.weight")))
    assert "rank 0 gradient layers.1.linear.weight: got present" in told(verdict)[0]


def test_a_flag_that_does_not_follow_a_freeze_is_found() -> None:
    """What was built takes gradients throughout: the freeze is not seen."""
    case = programmed(Freeze(), STEP, Unfreeze(), Train())
    verdict = freezing.frozen_match_oracle(case, Answers())
    sentences = told(verdict)
    flags = [line for line in sentences if "requires_grad" in line]
    assert flags == [
        f"action 0 (freeze) rank {rank} requires_grad of {NAME}: got True, should be False"
        for rank in range(2)
    ]


def test_values_that_a_freeze_changes_are_found() -> None:
    case = programmed(Freeze(part="half"), Train())
    run = showing(everywhere(observed(case), 0, moving("head.weight")))
    sentences = told(freezing.frozen_match_oracle(case, run))
    assert any("action 0 (freeze) rank 0 parameter head.weight" in line for line in sentences)


def test_a_restore_that_writes_other_values_is_found() -> None:
    case = programmed(STEP, Restore(), Train())
    run = showing(everywhere(observed(case), 1, moving(NAME)))
    sentences = told(freezing.restore_takes_effect(case, run))
    assert any(f"action 1 (restore) rank 0 parameter {NAME}[0, 0]" in line for line in sentences)


@pytest.mark.parametrize(
    "check", [freezing.frozen_match_oracle, freezing.unused_stay, freezing.restore_takes_effect]
)
def test_programs_without_the_action_are_not_judged(check: Any) -> None:
    assert check(programmed(STEP), Answers()).outcome == "not_applicable"

"""Programs with actions that must change nothing: every trace that one leaves is found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from fsdp_engine.contract.actions import (
    Eval,
    Export,
    Infer,
    Interrupt,
    Train,
)
from fsdp_engine.contract.case import Case
from fsdp_engine.contract.observation import (
    ExportRecord,
    Observation,
    Record,
    TrainRecord,
)
from oracles.metamorphic import without
from properties.checks import atomicity, inference
from tests.altered import NAME, STEP, changed, moving, programmed, told, with_moments
from tests.observed import Answers, everywhere, observed, showing, spoilt

INTERRUPTED = programmed(STEP, Interrupt(), Train())


def interrupted(change: Callable[[Record], Record], *, index: int = 1, rank: int = 1) -> Answers:
    """A run whose interrupted program shows this on one rank; without interrupts it is clean."""

    def observe(case: Case) -> Observation:
        clean = observed(case)
        has_interrupts = any(isinstance(action, Interrupt) for action in case.program)
        return spoilt(clean, rank, index, change) if has_interrupts else clean

    return Answers(observe=observe)


def test_the_rest_of_a_program_keeps_its_places() -> None:
    shorter = without(INTERRUPTED, ("interrupt",))
    assert shorter is not None
    assert shorter.case.program == (STEP, Train())
    assert shorter.kept == (0, 2)
    assert without(INTERRUPTED, ("interrupt", "train")) is None


def test_an_interrupt_that_leaves_nothing_passes() -> None:
    injected = changed(raised="InjectedFailure", injected=True)
    assert atomicity.changes_nothing(INTERRUPTED, interrupted(injected)).passed
    assert atomicity.changes_nothing(INTERRUPTED, Answers()).passed


@pytest.mark.parametrize(
    ("change", "index", "sentence"),
    [
        (changed(injected=True), 1, "(interrupt) rank 1 exception: got none, should be Injected"),
        (changed(raised="RuntimeError", injected=True), 1, "exception: got RuntimeError"),
        (changed(training=False), 1, "rank 1 training flag after: got False, should be True"),
        (changed(requires_grad={NAME: False}), 1, f"requires_grad of {NAME}: got False"),
        (moving(NAME), 1, f"(interrupt) rank 1 parameter {NAME}[0, 0]: got "),
        (changed(total_loss=2.0), 2, "(train) rank 1, with interrupts against none total_loss"),
        (changed(metrics={"loss": 2.0}), 2, "against none metrics"),
        (changed(lr=0.5), 0, "action 0 (train) rank 1, with interrupts against none lr"),
        (changed(collectives=()), 2, "collectives behind an interrupt count: got 0"),
    ],
)
def test_what_an_interrupt_leaves_is_found(
    change: Callable[[Record], Record], index: int, sentence: str
) -> None:
    verdict = atomicity.changes_nothing(INTERRUPTED, interrupted(change, index=index))
    assert any(sentence in line for line in told(verdict)), told(verdict)


def test_optimizer_state_that_an_interrupt_changes_is_found() -> None:
    def observe(case: Case) -> Observation:
        shown = with_moments(case, observed(case), 0, 1.0)
        return with_moments(case, shown, 1, 2.0) if len(case.program) == 3 else shown

    verdict = atomicity.changes_nothing(INTERRUPTED, Answers(observe=observe))
    assert f"action 1 (interrupt) rank 0 exp_avg {NAME}[0, 0]: got 2.0" in told(verdict)[0]


def test_another_collective_behind_an_interrupt_is_found() -> None:
    def change(record: Record) -> Record:
        assert isinstance(record, TrainRecord)
        first, *rest = record.collectives
        other = dataclasses.replace(first, elements=first.elements + 1)
        return dataclasses.replace(record, collectives=(other, *rest))

    verdict = atomicity.changes_nothing(INTERRUPTED, interrupted(change, index=2))
    assert "collectives behind an interrupt number 0" in told(verdict)[0]


def test_where_units_are_optional_communication_is_not_compared() -> None:
    case = programmed(Interrupt(), Train(), optional="unit")
    assert atomicity.changes_nothing(case, interrupted(changed(collectives=()))).passed


def test_a_program_without_an_interrupt_is_not_judged() -> None:
    assert atomicity.changes_nothing(programmed(STEP), Answers()).outcome == "not_applicable"


LOOKING = programmed(STEP, Eval(), Infer(), Train())


def test_looking_passes_where_nothing_changes() -> None:
    assert inference.changes_nothing(LOOKING, Answers()).passed


@pytest.mark.parametrize(
    ("change", "index", "sentence"),
    [
        (changed(training=False), 1, "action 1 (eval) rank 0 training flag after: got False"),
        (moving(NAME), 1, f"action 1 (eval) rank 0 parameter {NAME}[0, 0]: got "),
        (changed(total_loss=2.0), 3, "action 3 (train) rank 0, with inference against none"),
        (changed(notes=("fell back",)), 3, "against none notes"),
    ],
)
def test_what_looking_changes_is_found(
    change: Callable[[Record], Record], index: int, sentence: str
) -> None:
    def observe(case: Case) -> Observation:
        clean = observed(case)
        return everywhere(clean, index, change) if len(case.program) == 4 else clean

    verdict = inference.changes_nothing(LOOKING, Answers(observe=observe))
    assert any(sentence in line for line in told(verdict)), told(verdict)


def test_a_mode_that_an_export_leaves_is_found() -> None:
    def change(record: Record) -> Record:
        assert isinstance(record, ExportRecord)
        after = dataclasses.replace(record.after, training=False)
        return dataclasses.replace(record, after=after)

    case = programmed(Export())
    shown = everywhere(observed(case), 0, change)
    shown = dataclasses.replace(
        shown, ranks=tuple(dataclasses.replace(own, training=False) for own in shown.ranks)
    )
    assert inference.changes_nothing(case, showing(shown)).outcome == "pass"
    ranks = (shown.ranks[0], dataclasses.replace(shown.ranks[1], training=True))
    verdict = inference.changes_nothing(case, showing(dataclasses.replace(shown, ranks=ranks)))
    assert told(verdict) == [
        "action 0 (export) rank 1 training flag after: got False, should be True"
    ]

"""Programs with actions that must change nothing: every trace that one leaves is found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from fsdp_engine.contract.actions import (
    Action,
    Eval,
    Export,
    Freeze,
    Infer,
    Interrupt,
    Restore,
    Train,
    Unfreeze,
)
from fsdp_engine.contract.case import Case, Optimizer
from fsdp_engine.contract.model import Model
from fsdp_engine.contract.observation import (
    ExportRecord,
    LocalArray,
    Observation,
    Record,
    Replicate,
    StateRecord,
    TrainRecord,
)
from fsdp_engine.workload.models import build_model
from oracles.arrays import array_of, tensor_of
from oracles.metamorphic import without
from properties.checks import atomicity, freezing, inference
from tests.observed import Answers, everywhere, observed, showing, spoilt, worked_case

STEP = Train(step=True)


def programmed(*program: Action, **model: Any) -> Case:
    case = worked_case(program=program, model=Model(units=2, **model), dtypes="fp32")
    return dataclasses.replace(case, optimizer=Optimizer(kind="adamw", weight_decay=0.0625))


def moved(parts: tuple[LocalArray, ...], name: str) -> tuple[LocalArray, ...]:
    """The parts with one element of one parameter changed."""

    def change(part: LocalArray) -> LocalArray:
        assert part.data is not None
        value = tensor_of(part.data)
        value.reshape(-1)[0] += 1.0
        return dataclasses.replace(part, data=array_of(value))

    return tuple(change(part) if part.name == name else part for part in parts)


def changed(**fields: Any) -> Callable[[Record], Record]:
    def change(record: Record) -> Record:
        return dataclasses.replace(record, **fields)

    return change


def moving(name: str) -> Callable[[Record], Record]:
    def change(record: Record) -> Record:
        assert isinstance(record, StateRecord | TrainRecord)
        return dataclasses.replace(record, parameters=moved(record.parameters, name))

    return change


def with_moments(case: Case, observation: Observation, index: int, value: float) -> Observation:
    """The observation with an optimizer state of this value in one record of every rank."""
    parts = tuple(
        LocalArray(
            name=name,
            full_shape=tuple(parameter.shape),
            placement=Replicate(),
            data=array_of(parameter.detach().new_full(parameter.shape, value)),
        )
        for name, parameter in build_model(case).named_parameters()
    )
    return everywhere(observation, index, changed(optimizer_state={"exp_avg": parts}))


def told(verdict: Any) -> list[str]:
    return [str(mismatch) for mismatch in verdict.mismatches]


INTERRUPTED = programmed(STEP, Interrupt(), Train())
NAME = "layers.0.linear.weight"


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

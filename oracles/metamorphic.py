"""The same program with and without some of its actions, and what must be left by those actions.

Where an action changes nothing, a program without it shows the same bits in all other actions.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from fsdp_engine.contract.actions import Action, Freeze, Unfreeze
from fsdp_engine.contract.case import Case
from fsdp_engine.contract.observation import (
    ExportRecord,
    InferRecord,
    LocalArray,
    Observation,
    OptimizerState,
    RankObservation,
    Record,
    StateRecord,
    TrainRecord,
)
from fsdp_engine.workload.models import parameter_names, part_names, trained_names
from oracles.bitwise import array_mismatches, part_mismatches
from oracles.verdict import Mismatch

_NUMBERS = ("plan", "total_loss", "norm", "stepped", "lr", "metrics", "notes")
_PARTS = ("gradients", "clipped", "parameters")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shorter:
    """A case without some actions; `kept` are the places of the others in the whole program."""

    case: Case
    kept: tuple[int, ...]


def whole(case: Case) -> Shorter:
    """The case itself, to be compared with another of as many actions."""
    return Shorter(case=case, kept=tuple(range(len(case.program))))


def without(case: Case, kinds: Collection[str]) -> Shorter | None:
    """The case without the actions of these kinds; None where nothing is left."""
    kept = tuple(index for index, action in enumerate(case.program) if action.kind not in kinds)
    if not kept:
        return None
    program = tuple(case.program[index] for index in kept)
    return Shorter(case=replace(case, program=program), kept=kept)


def first_difference(
    shorter: Shorter, observation: Observation, other: Observation, *, told: str
) -> list[Mismatch]:
    """The first action whose records are not the same bits, on every rank.

    `observation` is the whole program's, `other` the shorter one's; `told` says in the sentences
    what the two are. What follows a difference differs as well, so it is left out.
    """
    for place, (index, action) in enumerate(zip(shorter.kept, shorter.case.program, strict=True)):
        found = [
            mismatch
            for rank, (own, alone) in enumerate(zip(observation.ranks, other.ranks, strict=True))
            for mismatch in record_mismatches(
                f"action {index} ({action.kind}) rank {rank}, {told}",
                own.records[index],
                alone.records[place],
            )
        ]
        if found:
            return found
    return []


def record_mismatches(where: str, got: Record, wanted: Record) -> list[Mismatch]:
    """Everything that two records of one action show, but for communication and memory."""
    match got, wanted:
        case InferRecord(), InferRecord():
            return array_mismatches(f"{where} losses", got.token_losses, wanted.token_losses)
        case TrainRecord(), TrainRecord():
            found = [
                mismatch
                for name in _NUMBERS
                for mismatch in told_mismatches(
                    f"{where} {name}", getattr(got, name), getattr(wanted, name)
                )
            ]
            for name in _PARTS:
                pair = (getattr(got, name), getattr(wanted, name))
                found += part_mismatches(f"{where} {name}", *pair)
            return found + state_mismatches(where, got.optimizer_state, wanted.optimizer_state)
        case StateRecord(), StateRecord():
            found = part_mismatches(f"{where} parameters", got.parameters, wanted.parameters)
            return found + state_mismatches(where, got.optimizer_state, wanted.optimizer_state)
        case ExportRecord(), ExportRecord():
            names = [[tensor.name for tensor in one.tensors] for one in (got, wanted)]
            if names[0] != names[1]:
                return told_mismatches(f"{where} names", *names)
            return [
                mismatch
                for one, other in zip(got.tensors, wanted.tensors, strict=True)
                for mismatch in array_mismatches(f"{where} {one.name}", one.value, other.value)
            ]
    return told_mismatches(where, got.kind, wanted.kind)


def state_mismatches(where: str, got: OptimizerState, wanted: OptimizerState) -> list[Mismatch]:
    """Two optimizer states of one rank."""
    return [
        mismatch
        for slot in sorted({*got, *wanted})
        for mismatch in part_mismatches(f"{where} {slot}", got.get(slot, ()), wanted.get(slot, ()))
    ]


def told_mismatches(where: str, got: object, wanted: object) -> list[Mismatch]:
    """Compared as text, so that NaN equals NaN."""
    if repr(got) == repr(wanted):
        return []
    return [Mismatch(where=where, got=repr(got), wanted=repr(wanted))]


@dataclass(slots=True, kw_only=True)
class _Held:
    """What a rank showed last; `optimizer` None: nothing yet."""

    parameters: tuple[LocalArray, ...]
    optimizer: OptimizerState | None = None


def left_mismatches(case: Case, observation: Observation, kinds: Collection[str]) -> list[Mismatch]:
    """What actions of these kinds left other than they found it, on any rank.

    Parameters (but for a restore, which writes them) and optimizer state are, bit for bit, what the
    rank showed last, the mode is that from before the program, and `requires_grad` what the program
    asked for last.
    """
    trainable = _trainable_after(case)
    return [
        mismatch
        for own in observation.ranks
        for mismatch in _left_by_rank(case, own, trainable, kinds)
    ]


def _left_by_rank(
    case: Case,
    own: RankObservation,
    trainable: list[dict[str, bool]],
    kinds: Collection[str],
) -> list[Mismatch]:
    held = _Held(parameters=own.initial)
    found: list[Mismatch] = []
    for index, (action, record) in enumerate(zip(case.program, own.records, strict=True)):
        where = f"action {index} ({action.kind}) rank {own.rank}"
        if isinstance(record, StateRecord) and action.kind in kinds:
            found += _state_left(where, action, record, held)
            found += told_mismatches(f"{where} training flag after", record.training, own.training)
            found += _flag_mismatches(where, record.requires_grad, trainable[index])
        if isinstance(record, ExportRecord) and action.kind in kinds:
            after, before = record.after, record.before
            found += part_mismatches(f"{where} parameter", after.parameters, held.parameters)
            found += told_mismatches(f"{where} training flag after", after.training, own.training)
            found += _flag_mismatches(where, after.requires_grad, before.requires_grad)
        if isinstance(record, StateRecord) or (
            isinstance(record, TrainRecord) and record.parameters
        ):
            held = _Held(parameters=record.parameters, optimizer=record.optimizer_state)
    return found


def _state_left(where: str, action: Action, record: StateRecord, held: _Held) -> list[Mismatch]:
    found: list[Mismatch] = []
    if action.kind != "restore":
        found += part_mismatches(f"{where} parameter", record.parameters, held.parameters)
    if held.optimizer is not None:
        found += state_mismatches(where, record.optimizer_state, held.optimizer)
    return found


def _flag_mismatches(where: str, got: dict[str, bool], wanted: dict[str, bool]) -> list[Mismatch]:
    """By the names that both know: a wrapper may register others."""
    return [
        Mismatch(where=f"{where} requires_grad of {name}", got=str(got[name]), wanted=str(flag))
        for name, flag in wanted.items()
        if name in got and got[name] != flag
    ]


def _trainable_after(case: Case) -> list[dict[str, bool]]:
    """For each action: what takes gradients once it is done, by name."""
    trained = trained_names(case.model)
    flags = {name: name in trained for name in parameter_names(case.model)}
    by_action = []
    for action in case.program:
        if isinstance(action, Freeze | Unfreeze):
            names = part_names(case, action.part)
            flags = flags | dict.fromkeys(names, isinstance(action, Unfreeze))
        by_action.append(flags)
    return by_action

"""Where a rank's model and optimizer rest between actions: on the host or on the device.

By the case's flags from the build on, and after a move where it said. A trainee that is built anew
begins with the flags again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fsdp_engine.contract.actions import Export, Load, Move, Resume
from fsdp_engine.contract.case import Case
from fsdp_engine.contract.observation import ExportRecord, RankObservation


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """True: on the host. The model is parameters with their gradients; buffers are told apart."""

    model: bool
    buffers: bool
    optimizer: bool


def is_staged(case: Case, action: Export) -> bool:
    """Whether an export holds the whole model on the device: `auto` by strategy and adapter."""
    suits = case.engine.strategy == "fsdp1" or bool(case.model.lora_rank)
    return action.staging == "force" or (
        action.staging == "auto" and suits and not case.engine.offload_policy
    )


def actual_places(case: Case, rank: RankObservation) -> tuple[Places, ...]:
    """As `resting_places`, but a staged export that was begun and is held keeps its model there."""
    places = list(resting_places(case))
    held = False
    for index, (action, record) in enumerate(zip(case.program, rank.records, strict=True)):
        if isinstance(action, Export) and action.drain == "hold":
            assert isinstance(record, ExportRecord)
            begun = 0 < len(record.tensors) == action.after
            held = begun and is_staged(case, action)
        held = held and not isinstance(action, Resume)
        if held:
            places[index + 1] = replace(places[index + 1], model=False, buffers=False)
    return tuple(places)


def resting_places(case: Case) -> tuple[Places, ...]:
    """After the build, and behind each action.

    FSDP2's own policy leaves buffers on the device; whoever moves a model moves its buffers.
    """
    engine = case.engine
    by_flags = Places(
        model=engine.param_offload or engine.offload_policy,
        buffers=engine.param_offload,
        optimizer=engine.optimizer_offload or engine.offload_policy,
    )
    places = [by_flags]
    for action in case.program:
        now = places[-1]
        if isinstance(action, Load) and action.fresh:
            now = by_flags
        if isinstance(action, Move):
            hosted = action.to == "host"
            if action.model:
                now = replace(now, model=hosted, buffers=hosted)
            if action.optimizer:
                now = replace(now, optimizer=hosted)
        places.append(now)
    return tuple(places)


def without_offload(case: Case) -> Case:
    """The same case with everything on the device: the same bits are to come of it.

    Moves stay, as moves to the device, so that actions keep their places.
    """
    engine = replace(
        case.engine, param_offload=False, optimizer_offload=False, offload_policy=False
    )
    program = tuple(
        replace(action, to="device") if isinstance(action, Move) else action
        for action in case.program
    )
    return replace(case, engine=engine, program=program)

"""What is resident in full and what is kept unsharded, per moment of a training action, in bytes.

For torch's two wrappers. FSDP1 keeps the flat gradient in the compute dtype and, without
resharding after forward, the padded flat parameter until gradients are synchronised. FSDP2 keeps
one unpadded gradient per parameter that has received one, in the dtype it adds up in, and frees
parameters after every backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fsdp_engine.contract.case import Case
from fsdp_engine.contract.observation import Numerics
from oracles.schedule import Snapshot, predict_schedule
from oracles.sharding import (
    ITEM_SIZE,
    UnitLayout,
    flat_elements,
    per_parameter_elements,
    unit_layouts,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What one rank should hold at one moment of a micro-batch.

    `unsharded`: parameters resident in full. Bytes are those of whole tensors, padding included
    where the wrapper pads.
    """

    moment: Literal["after_forward", "after_backward"]
    micro_batch: int
    unsharded: frozenset[str]
    gradient_bytes: int
    parameter_bytes: int


def predict_held(
    case: Case, numerics: Numerics, gated: tuple[bool, ...], *, deferred: bool
) -> tuple[Held, ...]:
    """After each forward and each backward of a training action, in order."""
    schedule = predict_schedule(case, numerics, gated, deferred=deferred)
    return tuple(_held(case, numerics, snapshot) for snapshot in schedule.snapshots)


def held_in_full(
    case: Case,
    numerics: Numerics,
    moment: Literal["after_forward", "after_backward"],
    *,
    syncing: bool,
    gated: bool | None,
) -> tuple[frozenset[str], frozenset[str]]:
    """The parameters that must and that may be resident in full at a moment, for any engine.

    `syncing`: the micro-batch's backward reduces gradients. `gated`: it uses the optional part;
    None: that differs between ranks.
    """
    root, *wrapped = unit_layouts(case)
    everything = _names((root, *wrapped))
    if case.mesh.shards == 1:
        return everything, everything
    zero3 = case.engine.reshard_after_forward
    if moment == "after_backward":
        if syncing:
            return frozenset(), frozenset()
        return frozenset(), _names((root,)) if zero3 else everything
    if zero3:
        own = _names((root,))
        return (own if numerics.semantics else frozenset()), own
    run = tuple(unit for unit in wrapped if gated or not unit.optional)
    return _names((root, *run)), everything


def _held(case: Case, numerics: Numerics, snapshot: Snapshot) -> Held:
    units = unit_layouts(case)
    gathered = tuple(unit for unit in units if unit.name in snapshot.gathered)
    if numerics.semantics == "fsdp1":
        gradient, parameter = _flat_bytes(case, numerics, snapshot, gathered)
    else:
        gradient, parameter = _per_parameter_bytes(case, numerics, snapshot, gathered)
    return Held(
        moment=snapshot.moment,
        micro_batch=snapshot.micro_batch,
        unsharded=_names(units if case.mesh.shards == 1 else gathered),
        gradient_bytes=gradient,
        parameter_bytes=parameter,
    )


def _flat_bytes(
    case: Case, numerics: Numerics, snapshot: Snapshot, gathered: tuple[UnitLayout, ...]
) -> tuple[int, int]:
    if case.mesh.shards == 1:
        return 0, 0  # not sharded, so nothing is held beyond the parameters and their gradients

    def size(units: tuple[UnitLayout, ...]) -> int:
        elements = sum(
            flat_elements(unit.parameters, case.mesh.shards, numerics.compute) for unit in units
        )
        return elements * ITEM_SIZE[numerics.compute]

    waiting = tuple(unit for unit in unit_layouts(case) if unit.name in snapshot.waiting_units)
    return size(waiting), size(gathered)


def _per_parameter_bytes(
    case: Case, numerics: Numerics, snapshot: Snapshot, gathered: tuple[UnitLayout, ...]
) -> tuple[int, int]:
    waiting = sum(
        parameter.numel
        for unit in unit_layouts(case)
        for parameter in unit.parameters
        if parameter.name in snapshot.waiting
    )
    parameters = sum(per_parameter_elements(unit.parameters, case.mesh.shards) for unit in gathered)
    return (
        waiting * ITEM_SIZE[numerics.local_accumulate],
        parameters * ITEM_SIZE[numerics.compute],
    )


def _names(units: tuple[UnitLayout, ...]) -> frozenset[str]:
    return frozenset(parameter.name for unit in units for parameter in unit.parameters)

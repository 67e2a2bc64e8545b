"""Which copies between host and device a program needs.

A pass needs none. Around the passes a batch needs its counts and its plan agreed on, and a
micro-batch its tensors on the device and its loss on the host. A step needs the norm, and what
tells whether a parameter was used. An export of what is on the device needs at most the bounds of
the shards.

What rests on the host is copied to the device by whoever uses it and back behind that: the model
around a mode and a staged export, the optimizer's state around a step. An export that is not
staged copies each tensor's own part. FSDP2's offload policy copies in for every gather and out
every reduced gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fsdp_engine.contract.case import Case
from fsdp_engine.contract.model import Model
from fsdp_engine.contract.observation import Copy, LocalArray, OptimizerState, RankObservation
from fsdp_engine.workload.models import parameter_names
from oracles.sharding import (
    ITEM_SIZE,
    BufferLayout,
    buffer_layouts,
    flat_elements,
    tied_names,
    unit_layouts,
)

TENSORS_OF_A_MICRO_BATCH = 5
"""Inputs, attention mask, gates, targets, loss mask."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """The most copies of one direction in one phase, and the most bytes of all of them."""

    count: int
    num_bytes: int

    def __add__(self, other: Allowed) -> Allowed:
        return Allowed(count=self.count + other.count, num_bytes=self.num_bytes + other.num_bytes)

    def __mul__(self, times: int) -> Allowed:
        return Allowed(count=self.count * times, num_bytes=self.num_bytes * times)


NOTHING = Allowed(count=0, num_bytes=0)


def bounds(case: Case) -> Allowed:
    """At most what agreeing on the bounds of all shards takes: two integers for every rank's."""
    num_bytes = 16 * len(parameter_names(case.model)) * case.mesh.world_size
    return Allowed(count=1, num_bytes=num_bytes)


def whole_model(case: Case, rank: RankObservation) -> Allowed:
    """A rank's parameters and buffers, moved once: FSDP1's by its units, FSDP2's one by one."""
    return parameters(case, rank) + _buffers(buffer_layouts(case))


def parameters(case: Case, rank: RankObservation) -> Allowed:
    """A rank's parameters, or as many gradients, moved once."""
    if case.engine.strategy == "fsdp2":
        return _parts(rank.initial)
    compute, shards = case.dtypes.compute, case.mesh.shards
    sizes = [flat_elements(unit.parameters, shards, compute) for unit in unit_layouts(case)]
    item = ITEM_SIZE[case.dtypes.storage]
    flats = [elements // shards * item for elements in sizes if elements]
    return Allowed(count=len(flats), num_bytes=sum(flats))


def moments(state: OptimizerState) -> Allowed:
    """An optimizer's state moved once. Its step counters are on the host in any case."""
    own = [part for slot, parts in state.items() if slot != "step" for part in parts]
    return _parts(tuple(own))


def unstaged(case: Case, rank: RankObservation, *, buffers_on_host: bool) -> Allowed:
    """An export of the state dict from the host: each name's own part, buffers where they are."""
    parts = {part.name: part for part in rank.initial}
    own = tuple(parts[name] for name in tied_names(case))
    saved = tuple(buffer for buffer in buffer_layouts(case) if buffer.saved)
    return _parts(own) + (_buffers(saved) if buffers_on_host else NOTHING)


def _parts(arrays: tuple[LocalArray, ...]) -> Allowed:
    sizes = [
        math.prod(part.data.shape) * ITEM_SIZE[part.data.dtype]
        for part in arrays
        if part.data is not None and part.data.data
    ]
    return Allowed(count=len(sizes), num_bytes=sum(sizes))


def _buffers(buffers: tuple[BufferLayout, ...]) -> Allowed:
    return Allowed(count=len(buffers), num_bytes=sum(buffer.num_bytes for buffer in buffers))


def crossings(copies: tuple[Copy, ...], phase: str, direction: str) -> tuple[Copy, ...]:
    """The copies of one phase in one direction."""
    return tuple(copy for copy in copies if (copy.phase, copy.direction) == (phase, direction))


def reads_values(model: Model) -> bool:
    """Whether the model's own forward asks values of the device: gates, routing to experts."""
    return model.optional != "none" or model.family == "mixtral"


def allowed_in_training(
    *,
    num_micro_batches: int,
    batch_bytes: int,
    world_size: int,
    num_parameters: int,
    model_reads: bool,
) -> dict[tuple[str, str], Allowed]:
    """By phase and direction. `batch_bytes`: of all of the rank's micro-batches together.

    `model_reads`: the passes read what the model asks for, which is not the engine's.
    """
    agreed = 64  # counts, plans: a few integers
    read = Allowed(count=num_micro_batches + 2, num_bytes=8 * num_micro_batches + 2 * agreed)
    written = Allowed(
        count=TENSORS_OF_A_MICRO_BATCH * num_micro_batches + 2, num_bytes=batch_bytes + 2 * agreed
    )
    told = Allowed(count=3, num_bytes=16 * world_size + num_parameters)
    by_model = Allowed(count=1 << 20, num_bytes=1 << 30) if model_reads else NOTHING
    return {
        ("plan", "host_to_device"): written,
        ("plan", "device_to_host"): read,
        ("forward", "host_to_device"): NOTHING,
        ("forward", "device_to_host"): by_model,
        ("backward", "host_to_device"): NOTHING,
        ("backward", "device_to_host"): by_model,
        ("step", "host_to_device"): told,
        ("step", "device_to_host"): told,
    }

"""The collectives of a training action: the list that torch's wrappers issue, in order.

The wrapper is retold as a small machine: which units are gathered, which gradients wait, what
happens at each hook. Checked against real ranks with torch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from fsdp_engine.contract.case import Case
from fsdp_engine.contract.observation import Axis, Collective, Numerics, Operation, Phase
from oracles.sharding import (
    ParameterLayout,
    UnitLayout,
    flat_elements,
    per_parameter_elements,
    unit_layouts,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What the wrapper holds at one moment of a micro-batch.

    `gathered` names the units whose parameters are there in full, `waiting` the parameters whose
    unsharded gradients wait for a reduction, `waiting_units` their units.
    """

    moment: Literal["after_forward", "after_backward"]
    micro_batch: int
    gathered: frozenset[str]
    waiting: frozenset[str]
    waiting_units: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The collectives of one rank's forwards and backwards, in order, and what is held between."""

    collectives: tuple[Collective, ...]
    snapshots: tuple[Snapshot, ...]


def predict_schedule(
    case: Case, numerics: Numerics, gated: tuple[bool, ...], *, deferred: bool
) -> Schedule:
    """The schedule of a training action that starts with every unit sharded.

    `gated` says for each micro-batch whether the optional part is used, on every rank alike.
    `numerics.semantics` names the wrapper.
    """
    machine = _Machine(case=case, numerics=numerics)
    for micro_batch, uses_optional in enumerate(gated):
        machine.micro_batch = micro_batch
        machine.syncing = not deferred or micro_batch == len(gated) - 1
        machine.uses_optional = uses_optional
        machine.forward()
        machine.snapshot("after_forward")
        if numerics.semantics == "fsdp1":
            machine.backward_flat()
        else:
            machine.backward_per_parameter()
        machine.snapshot("after_backward")
    return Schedule(collectives=tuple(machine.collectives), snapshots=tuple(machine.snapshots))


@dataclass(slots=True, kw_only=True)
class _Machine:
    """One rank's wrapper. Units are named; the root is the empty name."""

    case: Case
    numerics: Numerics
    micro_batch: int = 0
    syncing: bool = True
    uses_optional: bool = True
    gathered: set[str] = field(default_factory=set)
    waiting: dict[str, set[str]] = field(default_factory=dict)
    collectives: list[Collective] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)

    @property
    def root(self) -> UnitLayout:
        return unit_layouts(self.case)[0]

    @property
    def running(self) -> tuple[UnitLayout, ...]:
        """The wrapped units of this micro-batch in forward order."""
        wrapped = unit_layouts(self.case)[1:]
        return tuple(unit for unit in wrapped if self.uses_optional or not unit.optional)

    def forward(self) -> None:
        for unit in (self.root, *self.running):
            self._gather(unit, "forward")
        if self.case.engine.reshard_after_forward:
            # The root stays: its parameters come first in the backward.
            self.gathered -= {unit.name for unit in self.running}

    def backward_flat(self) -> None:
        """FSDP1: a unit's gradients are reduced as soon as its flat parameter has all of them."""
        prefetched = [unit for unit in reversed(self.running) if unit.output_needs_grad]
        for unit in prefetched[:1]:
            self._gather(unit, "backward")
        for index, unit in enumerate(prefetched):
            for following in prefetched[index + 1 : index + 2]:
                self._gather(following, "backward")
            self._finish_flat(unit)
        self._finish_flat(self.root)
        if self.syncing or self.case.engine.reshard_after_forward:
            self.gathered.clear()

    def backward_per_parameter(self) -> None:
        """FSDP2: a unit's gradients are reduced when the gradient of its input is there.

        A unit that has no such input waits for the end of the backward, as the root does, which
        goes first. Gathering ahead follows the order of the forward, needed or not.
        """
        order = tuple(reversed(self.running))
        for unit in order[:1]:
            self._gather(unit, "backward")
        finished = set()
        for index, unit in enumerate(order):
            if not unit.output_needs_grad:
                continue
            for following in order[index + 1 : index + 2]:
                self._gather(following, "backward")
            if unit.input_needs_grad:
                finished.add(unit.name)
                self._finish_per_parameter(unit)
        for unit in unit_layouts(self.case):
            if unit.name not in finished:
                self._finish_per_parameter(unit)
        self.gathered.clear()

    def snapshot(self, moment: Literal["after_forward", "after_backward"]) -> None:
        waiting = frozenset(name for names in self.waiting.values() for name in names)
        self.snapshots.append(
            Snapshot(
                moment=moment,
                micro_batch=self.micro_batch,
                gathered=frozenset(self.gathered),
                waiting=waiting,
                waiting_units=frozenset(unit for unit, names in self.waiting.items() if names),
            )
        )

    def _gather(self, unit: UnitLayout, phase: Phase) -> None:
        if unit.name in self.gathered:
            return
        self.gathered.add(unit.name)
        shards = self.case.mesh.shards
        if shards > 1:
            elements = self._elements(unit.parameters)
            self._emit("all_gather", "shard", shards, self.numerics.compute, elements, phase)

    def _finish_flat(self, unit: UnitLayout) -> None:
        if not unit.trainable:
            return
        if not self.syncing:
            self.waiting[unit.name] = {parameter.name for parameter in unit.trainable}
            return
        self.waiting.pop(unit.name, None)
        elements = self._elements(unit.parameters)
        if self.case.mesh.shards == 1:
            # Unsharded: torch reduces over the group it would have sharded over.
            self._emit("all_reduce", "shard", 1, self.numerics.reduce, elements, "backward")
        else:
            self._reduce(elements)

    def _finish_per_parameter(self, unit: UnitLayout) -> None:
        waiting = self.waiting.setdefault(unit.name, set())
        if unit.name == "" or unit in self.running:
            waiting |= {
                parameter.name
                for parameter in unit.trainable
                if self.uses_optional or not parameter.optional
            }
        if not self.syncing:
            return
        reduced = tuple(parameter for parameter in unit.parameters if parameter.name in waiting)
        waiting.clear()
        if reduced:
            self._reduce(self._elements(reduced))

    def _reduce(self, elements: int) -> None:
        mesh, dtype = self.case.mesh, self.numerics.reduce
        if mesh.shards > 1:
            self._emit("reduce_scatter", "shard", mesh.shards, dtype, elements, "backward")
        if mesh.ndim == 2:
            part = elements // mesh.shards
            self._emit("all_reduce", "replicate", mesh.replicas, dtype, part, "backward")

    def _elements(self, parameters: Iterable[ParameterLayout]) -> int:
        members, shards = tuple(parameters), self.case.mesh.shards
        if self.numerics.semantics == "fsdp1":
            return flat_elements(members, shards, self.numerics.compute)
        return per_parameter_elements(members, shards)

    def _emit(  # noqa: PLR0917
        self,
        operation: Operation,
        axis: Axis,
        group_size: int,
        dtype: str,
        elements: int,
        phase: Phase,
    ) -> None:
        self.collectives.append(
            Collective(
                operation=operation,
                axis=axis,
                group_size=group_size,
                dtype=dtype,
                elements=elements,
                phase=phase,
                micro_batch=self.micro_batch,
            )
        )

"""A program as it went: what held before each action and after it.

What held is the engine's own: the parameters and the optimizer state it showed last. How one action
gets from the one to the other is for the checks to judge, and its errors are not carried on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from fsdp_engine.contract.actions import (
    Action,
    Freeze,
    Load,
    Save,
    Unfreeze,
    asks_for_step,
)
from fsdp_engine.contract.case import Case, Mesh, case_behind
from fsdp_engine.contract.observation import (
    LocalArray,
    Observation,
    OptimizerState,
    Record,
    StateRecord,
    TrainRecord,
)
from fsdp_engine.workload.models import part_names
from oracles.assembly import Assembled, assemble
from oracles.evaluation import Evaluator
from oracles.verdict import Mismatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What training goes on from.

    `weights` are full tensors in the storage dtype. `optimizer` is slot to name to full tensor; a
    parameter without state is missing. `frozen` names take no gradients. `schedule_steps` counts
    the steps of the learning rate so far, `saved_steps` those at the last checkpoint. `mesh` is the
    one that the ranks are in.
    """

    weights: dict[str, Tensor]
    optimizer: dict[str, dict[str, Tensor]]
    frozen: frozenset[str]
    schedule_steps: int
    saved_steps: int
    mesh: Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One action with every rank's record of it, in rank order.

    `after` is None where what it left does not fit together, which `mismatches` say; the program is
    not followed any further then.
    """

    index: int
    action: Action
    records: tuple[Record, ...]
    before: Snapshot
    after: Snapshot | None
    mismatches: tuple[Mismatch, ...] = ()

    def __str__(self) -> str:
        return f"action {self.index} ({self.action.kind})"

    @property
    def train_records(self) -> tuple[TrainRecord, ...]:
        """The records of a train or poison action."""
        found = tuple(record for record in self.records if isinstance(record, TrainRecord))
        assert len(found) == len(self.records)
        return found

    @property
    def state_records(self) -> tuple[StateRecord, ...]:
        """The records of an action that has nothing else to show."""
        found = tuple(record for record in self.records if isinstance(record, StateRecord))
        assert len(found) == len(self.records)
        return found


def moments(evaluator: Evaluator, observation: Observation) -> Iterator[Moment]:
    """The case's program, action by action."""
    case = evaluator.case
    shapes = evaluator.shapes
    before = Snapshot(
        weights=dict(evaluator.weights),
        optimizer={},
        frozen=frozenset(shapes) - evaluator.trainable,
        schedule_steps=0,
        saved_steps=0,
        mesh=case.mesh,
    )
    for index, action in enumerate(case.program):
        records = tuple(rank.records[index] for rank in observation.ranks)
        moment = _moment(evaluator, index, action, records, before)
        yield moment
        if moment.after is None:
            return
        before = moment.after


def assemble_state(
    mesh: Mesh,
    states: Sequence[OptimizerState],
    shapes: dict[str, tuple[int, ...]],
    *,
    where: str,
) -> tuple[dict[str, dict[str, Tensor]], list[Mismatch]]:
    """Slot to name to full tensor, of the first replica, and what does not fit together."""
    full: dict[str, dict[str, Tensor]] = {}
    mismatches: list[Mismatch] = []
    for slot in sorted({slot for state in states for slot in state}):
        assembled = assemble_slot(mesh, states, slot, shapes, where=where)
        mismatches += assembled.mismatches
        full[slot] = {name: t for name, t in assembled.full.items() if t is not None}
    return full, mismatches


def assemble_slot(
    mesh: Mesh,
    states: Sequence[OptimizerState],
    slot: str,
    shapes: dict[str, tuple[int, ...]],
    *,
    where: str,
) -> Assembled:
    """One slot of every replica."""
    parts = [state.get(slot, ()) for state in states]
    numbers = all(part.full_shape == () for rank in parts for part in rank)
    if numbers:
        parts = _with_numbers(parts)
    return assemble(
        parts,
        mesh=mesh,
        shapes=dict.fromkeys(shapes, ()) if numbers else shapes,
        where=f"{where} {slot}",
    )


def _moment(
    evaluator: Evaluator,
    index: int,
    action: Action,
    records: tuple[Record, ...],
    before: Snapshot,
) -> Moment:
    after = _expected(evaluator.case, action, before)
    moment = Moment(index=index, action=action, records=records, before=before, after=after)
    shown = [_shown(record) for record in records]
    if not any(parameters for parameters, _ in shown):
        return moment
    shapes, where = evaluator.shapes, f"{moment} parameter"
    assembled = assemble([p for p, _ in shown], mesh=after.mesh, shapes=shapes, where=where)
    weights = {name: t for name, t in assembled.full.items() if t is not None}
    absent = [name for name, tensor in assembled.full.items() if tensor is None]
    optimizer, misfits = assemble_state(
        after.mesh, [state for _, state in shown], shapes, where=f"{moment} optimizer state"
    )
    mismatches = [
        *assembled.mismatches,
        *misfits,
        *(Mismatch(where=f"{where} {name}", got="absent", wanted="present") for name in absent),
    ]
    if mismatches:
        return replace(moment, after=None, mismatches=tuple(mismatches))
    return replace(moment, after=replace(after, weights=weights, optimizer=optimizer))


def _shown(record: Record) -> tuple[tuple[LocalArray, ...], OptimizerState]:
    if isinstance(record, TrainRecord | StateRecord):
        return record.parameters, record.optimizer_state
    return (), {}


def _expected(case: Case, action: Action, before: Snapshot) -> Snapshot:
    """What holds behind an action but for what it shows itself."""
    after = replace(
        before,
        frozen=_frozen_after(case, action, before.frozen),
        schedule_steps=before.schedule_steps + asks_for_step(action),
    )
    match action:
        case Save():
            return replace(after, saved_steps=before.schedule_steps)
        case Load():
            here = case_behind(replace(case, mesh=before.mesh), action).mesh
            return replace(after, schedule_steps=before.saved_steps, mesh=here)
        case _:
            return after


def _frozen_after(case: Case, action: Action, frozen: frozenset[str]) -> frozenset[str]:
    if isinstance(action, Freeze):
        return frozen.union(part_names(case, action.part))
    if isinstance(action, Unfreeze):
        return frozen.difference(part_names(case, action.part))
    return frozen


def _with_numbers(parts: Sequence[tuple[LocalArray, ...]]) -> list[tuple[LocalArray, ...]]:
    """A rank that holds no element of a parameter keeps no number for it: others' stands in."""
    known = {part.name: part.data for rank in parts for part in rank if part.data is not None}
    return [
        tuple(part if part.data else replace(part, data=known.get(part.name)) for part in rank)
        for rank in parts
    ]

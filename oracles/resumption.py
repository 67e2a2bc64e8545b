"""What a program that goes back to a checkpoint must show: the same as without what was lost."""

from __future__ import annotations

from dataclasses import replace

from fsdp_engine.contract.actions import CHECKPOINT_ACTIONS, Load, Save
from fsdp_engine.contract.case import Case
from fsdp_engine.contract.observation import (
    Observation,
    RankObservation,
    StateRecord,
    TrainRecord,
)
from oracles.arrays import array_of
from oracles.bitwise import array_mismatches, part_mismatches
from oracles.metamorphic import Shorter, state_mismatches, told_mismatches
from oracles.moments import Moment, Snapshot
from oracles.verdict import Mismatch


def uninterrupted(case: Case) -> Shorter | None:
    """The case as if it had never been away from its checkpoints; None where nothing is left.

    Without saves, resumes and what lies between the one and the other.
    """
    kept: list[int] = []
    saved = 0
    for index, action in enumerate(case.program):
        if isinstance(action, Save):
            saved = len(kept)
        elif isinstance(action, Load):
            del kept[saved:]
        elif action.kind not in CHECKPOINT_ACTIONS:
            kept.append(index)
    if not kept:
        return None
    program = tuple(case.program[index] for index in kept)
    return Shorter(case=replace(case, program=program), kept=tuple(kept))


def loaded_mismatches(case: Case, observation: Observation) -> list[Mismatch]:
    """Where a resume on the same mesh leaves a rank other than its save found it, in any bit."""
    return [mismatch for own in observation.ranks for mismatch in _loaded_by_rank(case, own)]


def _loaded_by_rank(case: Case, own: RankObservation) -> list[Mismatch]:
    found: list[Mismatch] = []
    saved: StateRecord | None = None
    for index, (action, record) in enumerate(zip(case.program, own.records, strict=True)):
        if isinstance(action, Save):
            assert isinstance(record, StateRecord)
            saved = record
        if not isinstance(action, Load):
            continue
        assert isinstance(record, StateRecord)
        assert saved is not None
        where = f"action {index} (load) rank {own.rank}"
        found += part_mismatches(f"{where} parameter", record.parameters, saved.parameters)
        found += state_mismatches(where, record.optimizer_state, saved.optimizer_state)
        for name in ("random", "training", "requires_grad"):
            pair = (getattr(record, name), getattr(saved, name))
            found += told_mismatches(f"{where} {name}", *pair)
    return found


def snapshot_mismatches(moment: Moment, saved: Snapshot) -> list[Mismatch]:
    """Full tensors behind a resume against those at the save, whatever the meshes: every bit."""
    after = moment.after
    assert after is not None
    found: list[Mismatch] = []
    tables = {"parameter": (after.weights, saved.weights)} | {
        slot: (after.optimizer.get(slot, {}), saved.optimizer.get(slot, {}))
        for slot in sorted({*after.optimizer, *saved.optimizer})
    }
    for kind, (got, wanted) in tables.items():
        found += told_mismatches(f"{moment} {kind} names", sorted(got), sorted(wanted))
        for name in got.keys() & wanted.keys():
            where = f"{moment} {kind} {name}"
            found += array_mismatches(where, array_of(got[name]), array_of(wanted[name]))
    return found


def loss_mismatches(
    shorter: Shorter, observation: Observation, alone: Observation, resumed_at: int
) -> list[Mismatch]:
    """The first training action behind a resume: each rank's loss depends on the weights alone.

    `alone` is the uninterrupted case's.
    """
    for place, index in enumerate(shorter.kept):
        if index < resumed_at or shorter.case.program[place].kind != "train":
            continue
        found: list[Mismatch] = []
        for own, other in zip(observation.ranks, alone.ranks, strict=True):
            got, wanted = own.records[index], other.records[place]
            assert isinstance(got, TrainRecord)
            assert isinstance(wanted, TrainRecord)
            where = f"action {index} (train) rank {own.rank} loss behind a resume"
            found += told_mismatches(where, got.total_loss, wanted.total_loss)
        return found
    return []

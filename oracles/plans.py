"""What a prediction relies on before it starts: the engine's plan and its declared numerics."""

from __future__ import annotations

from fsdp_engine.contract.case import Case
from fsdp_engine.contract.observation import Numerics
from oracles.records import TrainAction
from oracles.reduction import divides_by, levels_follow_mesh
from oracles.verdict import Mismatch


def plan_mismatches(case: Case, action: TrainAction) -> list[Mismatch]:
    """Where micro-batches are no partition of a rank's sequences, or ranks differ in number."""
    found = []
    sequences = case.batches[action.batch].ranks
    for rank, (record, held) in enumerate(zip(action.records, sequences, strict=True)):
        where = f"{action} plan, rank {rank}"
        planned = sorted(index for indices in record.plan for index in indices)
        if planned != list(range(len(held))):
            wanted = f"each of 0 to {len(held) - 1} once"
            found.append(Mismatch(where=where, got=str(record.plan), wanted=wanted))
        elif not all(record.plan):
            found.append(Mismatch(where=where, got=str(record.plan), wanted="no empty micro-batch"))
    counts = [len(record.plan) for record in action.records]
    if len(set(counts)) > 1:
        where = f"{action} plan: number of micro-batches by rank"
        found.append(Mismatch(where=where, got=str(counts), wanted="the same on all ranks"))
    return found


def numerics_mismatches(case: Case, numerics: Numerics) -> list[Mismatch]:
    """Where the declared numerics do not describe a mean over the case's ranks in its dtypes."""
    mesh = case.mesh
    sizes = [(level.axis, level.size) for level in numerics.levels]
    facts: list[tuple[str, object, object, bool]] = [
        ("storage", numerics.storage, case.dtypes.storage, False),
        ("compute", numerics.compute, case.dtypes.compute, False),
        ("reduce", numerics.reduce, case.dtypes.reduce, False),
        ("deferred", numerics.deferred, case.engine.deferred, False),
        ("levels", sizes, f"the axes of mesh {mesh.shape}", levels_follow_mesh(numerics, mesh)),
        ("levels: product of the divisors", divides_by(numerics), mesh.world_size, False),
    ]
    return [
        Mismatch(where=f"declared numerics: {field}", got=str(got), wanted=str(wanted))
        for field, got, wanted, fine in facts
        if not fine and got != wanted
    ]

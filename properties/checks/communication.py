"""The collectives of training: what every engine owes, and torch's wrappers to the last element."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fsdp_engine.contract.case import Case
from fsdp_engine.contract.observation import Axis, Collective, Numerics
from fsdp_engine.contract.protocol import Run
from oracles.communication import (
    Level,
    UnitReductions,
    predict_levels,
    predict_reductions,
    smallest_part,
)
from oracles.records import PASSES, TrainAction, actions_as_built, gates, uniform_gates
from oracles.schedule import predict_schedule
from oracles.verdict import Mismatch, Verdict, exactly, not_applicable

_REDUCTIONS = ("reduce_scatter", "all_reduce")


def reduces_every_unit(case: Case, run: Run) -> Verdict:
    """Each unit with trainable parameters is reduced once per micro-batch, or once when deferred.

    The reductions are a reduce-scatter over the shard group and an all-reduce over the replicas,
    in the reduce dtype, in the backward; none as large as a unit's gradient is on another group.
    A fall-back to eager sync is judged as eager, without the traffic of the abandoned attempt.
    """
    observation = run(case)
    mismatches: list[Mismatch] = []
    judged = False
    for action in actions_as_built(case, observation):
        counts = [len(record.plan) for record in action.records]
        if len(set(counts)) > 1:
            got = f"micro-batches by rank {counts}"
            mismatches.append(Mismatch(where=str(action), got=got, wanted="one number"))
            continue
        judged = True
        deferred = case.engine.deferred and not action.fell_back
        wanted = predict_reductions(
            case, observation.numerics, gates(case, action), deferred=deferred
        )
        for rank in range(len(action.records)):
            mismatches += _reduction_mismatches(case, observation.numerics, action, rank, wanted)
    if not judged and not mismatches:
        return not_applicable("no training action")
    return exactly(mismatches)


def same_in_every_group(case: Case, run: Run) -> Verdict:
    """All ranks of a group issue the same collectives on it, in the same order."""
    observation = run(case)
    logs = [rank.build_collectives for rank in observation.ranks]
    mismatches = _group_mismatches("build", case, logs)
    for index, action in enumerate(case.program):
        logs = [rank.records[index].collectives for rank in observation.ranks]
        mismatches += _group_mismatches(f"action {index} ({action.kind})", case, logs)
    return exactly(mismatches)


def matches_schedule(case: Case, run: Run) -> Verdict:
    """The exact list of the forward's and backward's collectives, for torch's own wrappers.

    Compared: operation, axis, group size, dtype, elements, phase, micro-batch and order.
    Not applicable to an action that fell back to eager sync, and where ranks differ in whether a
    micro-batch uses the model's optional part. Right after an infer or export, units may still be
    gathered: then the first micro-batch's forward all-gathers are left out.
    """
    observation = run(case)
    if not observation.numerics.semantics:
        return not_applicable("the engine declares no wrapper whose schedule is predicted")
    mismatches: list[Mismatch] = []
    judged = False
    for action in actions_as_built(case, observation):
        gated = uniform_gates(case, action)
        if gated is None or action.fell_back:
            continue
        judged = True
        schedule = predict_schedule(
            case, observation.numerics, gated, deferred=case.engine.deferred
        )
        wanted = _passes(schedule.collectives, action)
        for rank, record in enumerate(action.records):
            got = _passes(record.collectives, action)
            mismatches += _first_difference(f"{action} rank {rank}", case, got, wanted)
    if not judged:
        return not_applicable("no training action with the same schedule on all ranks")
    return exactly(mismatches)


def _reduction_mismatches(
    case: Case,
    numerics: Numerics,
    action: TrainAction,
    rank: int,
    wanted: tuple[UnitReductions, ...],
) -> list[Mismatch]:
    levels = predict_levels(case)
    issued = _final_reductions(action, rank)
    mismatches = []
    for level in levels:
        where = f"{action} rank {rank} {level.operation} on {level.axis} of {level.group_size}"
        own = [collective for collective in issued if _is_on(collective, level)]
        mismatches += _count_mismatches(where, own, level, wanted)
        dtypes = {collective.dtype for collective in own} - {numerics.reduce}
        mismatches += [
            Mismatch(where=where, got=dtype, wanted=f"reduce dtype {numerics.reduce}")
            for dtype in sorted(dtypes)
        ]
    least = min((unit.elements for unit in wanted), default=0)
    mismatches += [
        Mismatch(
            where=f"{action} rank {rank}",
            got=f"a gradient-sized {told(collective)}",
            wanted=" or ".join(map(_told_level, levels)) or "no reduction",
        )
        for collective in issued
        if not any(_is_on(collective, level) for level in levels) and collective.elements >= least
    ]
    return mismatches


def _final_reductions(action: TrainAction, rank: int) -> list[Collective]:
    """The backward's reductions over more than one rank, those of an abandoned attempt left out."""
    record, first = action.records[rank], action.first_forward(rank)
    return [
        collective
        for collective in record.collectives
        if collective.phase == "backward"
        and collective.operation in _REDUCTIONS
        and collective.group_size > 1
        and collective.micro_batch >= first
    ]


def _count_mismatches(
    where: str, own: list[Collective], level: Level, wanted: tuple[UnitReductions, ...]
) -> list[Mismatch]:
    least = sum(unit.least for unit in wanted)
    most = sum(unit.most for unit in wanted)
    if not least <= len(own) <= most:
        number = str(least) if least == most else f"{least} to {most}"
        units = ", ".join(f"{unit.unit or 'root'}: {unit.most}" for unit in wanted)
        return [Mismatch(where=where, got=f"{len(own)} times", wanted=f"{number} ({units})")]
    sizes = [smallest_part(unit, level) for unit in wanted for _ in range(unit.least)]
    # Largest against largest: some assignment of reductions to units fits exactly if this one does.
    pairs = zip(
        sorted((collective.elements for collective in own), reverse=True),
        sorted(sizes, reverse=True),
        strict=False,
    )
    return [
        Mismatch(where=where, got=f"{got} elements", wanted=f"at least {size}, a unit's gradient")
        for got, size in pairs
        if got < size
    ][:1]


def _group_mismatches(
    where: str, case: Case, logs: Sequence[tuple[Collective, ...]]
) -> list[Mismatch]:
    mismatches = []
    shards = case.mesh.shards
    for rank in range(case.mesh.world_size):
        firsts: dict[Axis, int] = {
            "shard": rank // shards * shards,
            "replicate": rank % shards,
            "world": 0,
        }
        for axis, first in firsts.items():
            got = [collective for collective in logs[rank] if collective.axis == axis]
            wanted = [collective for collective in logs[first] if collective.axis == axis]
            where_axis = f"{where} rank {rank} against rank {first} on {axis}"
            mismatches += _first_difference(where_axis, case, got, wanted)
            mismatches += _operator_difference(where_axis, got, wanted)
    return mismatches


def _operator_difference(
    where: str, got: Sequence[Collective], wanted: Sequence[Collective]
) -> list[Mismatch]:
    """Ranks that reduce by different operators mix their values without any error."""
    for index, (one, other) in enumerate(zip(got, wanted, strict=False)):
        if one.reduce_op != other.reduce_op:
            return [
                Mismatch(
                    where=f"{where}, operator of collective {index}",
                    got=one.reduce_op,
                    wanted=other.reduce_op,
                )
            ]
    return []


def _first_difference(
    where: str, case: Case, got: Sequence[Collective], wanted: Sequence[Collective]
) -> list[Mismatch]:
    for index in range(max(len(got), len(wanted))):
        one = told(got[index]) if index < len(got) else "nothing"
        other = told(wanted[index]) if index < len(wanted) else "nothing"
        if case.mesh.shape == (1, 1):  # both axes are the same single rank
            one, other = one.replace("replicate", "shard"), other.replace("replicate", "shard")
        if one != other:
            return [Mismatch(where=f"{where}, collective {index}", got=one, wanted=other)]
    return []


def _passes(collectives: Iterable[Collective], action: TrainAction) -> list[Collective]:
    return [
        collective
        for collective in collectives
        if collective.phase in PASSES
        and (
            action.after_training
            or (collective.phase, collective.micro_batch) != ("forward", 0)
            or collective.operation != "all_gather"
        )
    ]


def told(collective: Collective) -> str:
    """A collective in words."""
    return (
        f"{collective.operation} of {collective.elements} {collective.dtype} on"
        f" {collective.axis} of {collective.group_size}"
        f" in the {collective.phase} of micro-batch {collective.micro_batch}"
    )


def _told_level(level: Level) -> str:
    return f"{level.operation} on {level.axis} of {level.group_size}"


def _is_on(collective: Collective, level: Level) -> bool:
    return (collective.operation, collective.axis, collective.group_size) == (
        level.operation,
        level.axis,
        level.group_size,
    )

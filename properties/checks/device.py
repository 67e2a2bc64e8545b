"""What shows on a device alone: memory to the byte, copies, and the order of asynchronous work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from fsdp_engine.contract.actions import Train
from fsdp_engine.contract.case import Case
from fsdp_engine.contract.observation import (
    Copy,
    ExportRecord,
    Numerics,
    RankObservation,
    TrainRecord,
)
from fsdp_engine.contract.protocol import Run
from fsdp_engine.workload.models import parameter_names
from oracles.device_memory import (
    OWN_NUMBERS,
    at_rest,
    batch_bytes,
    behind_backward,
    is_predicted,
    optimizer_bytes,
    parameter_bytes,
)
from oracles.memory import predict_held
from oracles.metamorphic import Shorter, first_difference
from oracles.transfers import (
    ALLOWED_IN_EXPORT,
    Allowed,
    allowed_in_training,
    crossings,
    reads_values,
)
from oracles.verdict import Mismatch, Verdict, exactly, not_applicable

SCHEDULES = (0, 1, 2)
"""Nothing happens before it is waited for; then two in which some things do."""

_ON_THE_HOST = "the host has no memory, copies or streams of its own"


def memory_matches(case: Case, run: Run) -> Verdict:
    """Bytes held on the device: after the build, before and after every training action.

    They are those of the oracle, but for a few numbers that the engine keeps for itself.

    After every backward they are those at rest, the gradients that wait or were reduced and what
    the wrapper holds in full, and no more beside them than the micro-batch itself.
    """
    observation = run(case)
    if observation.ranks[0].device == "cpu":
        return not_applicable(_ON_THE_HOST)
    if not is_predicted(case, observation.numerics):
        return not_applicable("no wrapper, program or model whose bytes are predicted")
    built = at_rest(case, observation.numerics)
    mismatches: list[Mismatch] = []
    for rank in observation.ranks:
        where = f"rank {rank.rank} bytes on the device"
        mismatches += _bytes(f"{where} after the build", rank.built_bytes, built)
        mismatches += _training_bytes(case, observation.numerics, rank, built, where)
    return exactly(mismatches)


def _training_bytes(
    case: Case, numerics: Numerics, rank: RankObservation, built: int, where: str
) -> Iterator[Mismatch]:
    resting, reduced = built, parameter_bytes(case, numerics)
    for index, record in enumerate(rank.records):
        action = case.program[index]
        if not (isinstance(record, TrainRecord) and isinstance(action, Train)):
            continue
        place = f"action {index} (train) {where}"
        yield from _bytes(f"{place} before", record.device_bytes[0], resting)
        gated = (True,) * len(record.plan)
        held = predict_held(case, numerics, gated, deferred=case.engine.deferred)
        for sample, wanted in zip(record.residency, held, strict=True):
            if sample.moment != "after_backward":
                continue
            last = sample.micro_batch == len(record.plan) - 1
            floor = resting + behind_backward(case, numerics, wanted, last=last)
            indices = record.plan[sample.micro_batch]
            room = batch_bytes(case, action.batch, rank.rank, indices) + OWN_NUMBERS
            if not floor <= sample.device_bytes <= floor + room:
                yield Mismatch(
                    where=f"{place} after backward of micro-batch {sample.micro_batch}",
                    got=f"{sample.device_bytes}",
                    wanted=f"{floor}, and at most {room} of the micro-batch itself",
                )
        if record.stepped:
            resting = built + optimizer_bytes(case, rank)
        yield from _bytes(f"{place} after", record.device_bytes[1], resting + reduced)


def copies_are_needed(case: Case, run: Run) -> Verdict:
    """No copy between host and device that the program does not need; see `oracles.transfers`."""
    observation = run(case)
    if observation.ranks[0].device == "cpu":
        return not_applicable(_ON_THE_HOST)
    mismatches: list[Mismatch] = []
    for rank in observation.ranks:
        for index, (action, record) in enumerate(zip(case.program, rank.records, strict=True)):
            where = f"action {index} ({action.kind}) rank {rank.rank}"
            if isinstance(record, TrainRecord) and isinstance(action, Train):
                allowed = _allowed(case, action, record, rank.rank)
                mismatches += _too_many(where, record.copies, allowed)
            if isinstance(record, ExportRecord):
                mismatches += _too_many(where, record.copies, ALLOWED_IN_EXPORT)
    return exactly(mismatches)


def _allowed(
    case: Case, action: Train, record: TrainRecord, rank: int
) -> Mapping[tuple[str, str], Allowed]:
    sizes = [batch_bytes(case, action.batch, rank, indices) for indices in record.plan]
    return allowed_in_training(
        model_reads=reads_values(case.model),
        num_micro_batches=len(record.plan),
        batch_bytes=sum(sizes),
        world_size=case.mesh.world_size,
        num_parameters=len(parameter_names(case.model)),
    )


def _too_many(
    where: str, copies: tuple[Copy, ...], allowed: Mapping[tuple[str, str], Allowed]
) -> Iterator[Mismatch]:
    for (phase, direction), most in allowed.items():
        found = crossings(copies, phase, direction)
        num_bytes = sum(copy.num_bytes for copy in found)
        if len(found) > most.count or num_bytes > most.num_bytes:
            yield Mismatch(
                where=f"{where} {phase} {direction} copies",
                got=f"{len(found)} of {num_bytes} bytes",
                wanted=f"at most {most.count} of {most.num_bytes} bytes",
            )


def order_is_kept(case: Case, run: Run) -> Verdict:
    """Under every schedule nothing is used before it is there, and all bits are the same."""
    plain = run(case)
    if plain.ranks[0].device == "cpu":
        return not_applicable(_ON_THE_HOST)
    whole = Shorter(case=case, kept=tuple(range(len(case.program))))
    mismatches: list[Mismatch] = []
    for schedule in SCHEDULES:
        scheduled = run(replace(case, schedule=schedule))
        for rank in scheduled.ranks:
            mismatches += [
                Mismatch(where=f"schedule {schedule} rank {rank.rank}", got=race, wanted="a wait")
                for race in dict.fromkeys(rank.races)
            ]
        mismatches += first_difference(
            whole, scheduled, plain, told=f"schedule {schedule} against none"
        )
    return exactly(mismatches)


def _bytes(where: str, got: int, wanted: int) -> list[Mismatch]:
    if wanted <= got <= wanted + OWN_NUMBERS:
        return []
    return [Mismatch(where=where, got=str(got), wanted=str(wanted))]

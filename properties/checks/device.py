"""What shows on a device alone: memory to the byte, copies, and the order of asynchronous work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fsdp_engine.contract.case import Case
from fsdp_engine.contract.observation import (
    Copy,
    InferRecord,
    Numerics,
    RankObservation,
)
from fsdp_engine.contract.protocol import Run
from oracles.copies import Bounds, needed
from oracles.device_memory import (
    OWN_NUMBERS,
    Training,
    batch_bytes,
    behind_backward,
    gradient_bytes,
    has_footprint,
    is_predicted,
    model_bytes,
    trainings,
)
from oracles.footprint import footprints
from oracles.memory import predict_held
from oracles.metamorphic import first_difference, whole
from oracles.placement import resting_places
from oracles.transfers import crossings
from oracles.verdict import Mismatch, Verdict, exactly, not_applicable

SCHEDULES = (0, 1, 2)
"""Nothing happens before it is waited for; then two in which some things do."""

_ON_THE_HOST = "the host has no memory, copies or streams of its own"


def memory_matches(case: Case, run: Run) -> Verdict:
    """Bytes held on the device: after the build, before and after every training action.

    They are those of the oracle, but for a few numbers that the engine keeps for itself.

    After every backward they are those before, the gradients that wait or were reduced and what
    the wrapper holds in full, and no more beside them than the micro-batch itself.
    """
    observation = run(case)
    if observation.ranks[0].device == "cpu":
        return not_applicable(_ON_THE_HOST)
    if not is_predicted(case, observation.numerics):
        return not_applicable("no wrapper, program or model whose bytes are predicted")
    built = model_bytes(case, observation.numerics, resting_places(case)[0])
    mismatches: list[Mismatch] = []
    for rank in observation.ranks:
        where = f"rank {rank.rank} bytes on the device after the build"
        mismatches += _bytes(where, rank.built_bytes, built)
        mismatches += _training_bytes(case, observation.numerics, rank)
    return exactly(mismatches)


def _training_bytes(case: Case, numerics: Numerics, rank: RankObservation) -> Iterator[Mismatch]:
    for training in trainings(case, numerics, rank):
        action, record, place = training.action, training.record, training.place
        yield from _bytes(f"{place} before", record.device_bytes[0], training.resting)
        gated = (True,) * len(record.plan)
        held = predict_held(case, numerics, gated, deferred=case.engine.deferred)
        for sample, wanted in zip(record.residency, held, strict=True):
            if sample.moment == "after_backward":
                last = sample.micro_batch == len(record.plan) - 1
                floor = training.resting + behind_backward(case, numerics, wanted, last=last)
                indices = record.plan[sample.micro_batch]
                room = batch_bytes(case, action.batch, rank.rank, indices) + OWN_NUMBERS
                where = f"{place} after backward of micro-batch {sample.micro_batch}"
                yield from _bytes(where, sample.device_bytes, floor, room=room)
        after = training.kept + gradient_bytes(case, numerics)
        yield from _bytes(f"{place} after", record.device_bytes[1], after)


def peaks_match(case: Case, run: Run) -> Verdict:
    """The most bytes at once within every forward and every backward of a training action.

    At least those of `oracles.footprint`, and at most what Python may hold of this micro-batch and
    the one before beside them.
    """
    observation = run(case)
    if observation.ranks[0].device == "cpu":
        return not_applicable(_ON_THE_HOST)
    if not is_predicted(case, observation.numerics) or not has_footprint(case):
        return not_applicable("no wrapper, program or model whose peaks are predicted")
    mismatches: list[Mismatch] = []
    for rank in observation.ranks:
        for training in trainings(case, observation.numerics, rank):
            mismatches += _peaks(case, observation.numerics, rank.rank, training)
    return exactly(mismatches)


def _peaks(case: Case, numerics: Numerics, rank: int, training: Training) -> Iterator[Mismatch]:
    batch, plan = training.action.batch, training.record.plan
    predicted = footprints(case, numerics, batch=batch, rank=rank, plan=plan, first=training.first)
    sizes = [0, *(batch_bytes(case, batch, rank, indices) for indices in plan)]
    for sample in training.record.residency:
        number = sample.micro_batch
        phase = "forward" if sample.moment == "after_forward" else "backward"
        beside = getattr(predicted[number], phase)
        yield from _bytes(
            f"{training.place} at most in {phase} of micro-batch {number}",
            sample.device_peak,
            training.resting + beside,
            room=sizes[number] + sizes[number + 1] + 2 * OWN_NUMBERS,
        )


def copies_are_needed(case: Case, run: Run) -> Verdict:
    """No copy between host and device that the program does not need; see `oracles.transfers`.

    Of what rests on the host exactly the copies that are needed.
    """
    observation = run(case)
    if observation.ranks[0].device == "cpu":
        return not_applicable(_ON_THE_HOST)
    mismatches: list[Mismatch] = []
    for rank in observation.ranks:
        for index, bounds in enumerate(needed(case, rank)):
            record = rank.records[index]
            if not isinstance(record, InferRecord):
                where = f"action {index} ({case.program[index].kind}) rank {rank.rank}"
                mismatches += _out_of_bounds(where, record.copies, bounds)
    return exactly(mismatches)


def _out_of_bounds(
    where: str,
    copies: tuple[Copy, ...],
    bounds: Bounds,
) -> Iterator[Mismatch]:
    for (phase, direction), (least, most) in bounds.items():
        found = crossings(copies, phase, direction)
        num_bytes = sum(copy.num_bytes for copy in found)
        counted = least.count <= len(found) <= most.count
        if not (counted and least.num_bytes <= num_bytes <= most.num_bytes):
            wanted = f"at most {most.count} of {most.num_bytes} bytes"
            if least.count:
                wanted = f"at least {least.count} of {least.num_bytes} bytes, {wanted}"
            yield Mismatch(
                where=f"{where} {phase} {direction} copies",
                got=f"{len(found)} of {num_bytes} bytes",
                wanted=wanted,
            )


def order_is_kept(case: Case, run: Run) -> Verdict:
    """Under every schedule nothing is used before it is there, and all bits are the same."""
    plain = run(case)
    if plain.ranks[0].device == "cpu":
        return not_applicable(_ON_THE_HOST)
    mismatches: list[Mismatch] = []
    for schedule in SCHEDULES:
        scheduled = run(replace(case, schedule=schedule))
        for rank in scheduled.ranks:
            mismatches += [
                Mismatch(where=f"schedule {schedule} rank {rank.rank}", got=race, wanted="a wait")
                for race in dict.fromkeys(rank.races)
            ]
        mismatches += first_difference(
            whole(case), scheduled, plain, told=f"schedule {schedule} against none"
        )
    return exactly(mismatches)


def _bytes(where: str, got: int, floor: int, *, room: int = OWN_NUMBERS) -> list[Mismatch]:
    if floor <= got <= floor + room:
        return []
    wanted = str(floor) if room == OWN_NUMBERS else f"{floor}, and at most {room} of micro-batches"
    return [Mismatch(where=where, got=str(got), wanted=wanted)]

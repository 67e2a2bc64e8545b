"""Where tensors rest between actions, and that being there changes no bit."""

from __future__ import annotations

from collections.abc import Iterator

from fsdp_engine.contract.case import Case
from fsdp_engine.contract.observation import (
    ExportRecord,
    Numerics,
    RankObservation,
    TrainRecord,
)
from fsdp_engine.contract.protocol import Run
from oracles.device_memory import (
    OWN_NUMBERS,
    gradient_bytes,
    is_predicted,
    model_bytes,
    optimizer_bytes,
)
from oracles.metamorphic import first_difference, whole
from oracles.placement import actual_places, without_offload
from oracles.verdict import Mismatch, Verdict, exactly, not_applicable

_ON_THE_HOST = "the host and the device are the same place"
HOST = "cpu"


def rests_where_asked(case: Case, run: Run) -> Verdict:
    """After the build and behind every action each tensor is where flags and moves say.

    Gradients are with their parameters, the optimizer has no state before a step, and what an
    export yields is on the device. What the device holds behind an action is what rests there and
    nothing else, to the byte, where bytes are predicted: not on a GPU, whose libraries hold some.
    """
    observation = run(case)
    if observation.ranks[0].device == HOST:
        return not_applicable(_ON_THE_HOST)
    mismatches: list[Mismatch] = []
    for rank in observation.ranks:
        mismatches += _misplaced(case, rank)
        mismatches += _state_too_early(case, rank)
        mismatches += _yielded_elsewhere(case, rank)
        if observation.numerics.device is None and is_predicted(case, observation.numerics):
            mismatches += _bytes_at_rest(case, observation.numerics, rank)
    return exactly(mismatches)


def offload_changes_nothing(case: Case, run: Run) -> Verdict:
    """The same bits in every action as with everything on the device.

    But for gradients that a step has used, which may be dropped when the model goes to the host.
    """
    plain = without_offload(case)
    if plain == case:
        return not_applicable("nothing of the case rests on the host")
    observation, other = run(case), run(plain)
    told = "offloaded against on the device"
    return exactly(first_difference(whole(case), observation, other, told=told))


def _misplaced(case: Case, rank: RankObservation) -> Iterator[Mismatch]:
    device = rank.device.partition(":")[0]
    for place, resting, wanted in zip(
        _places(case), rank.resting, actual_places(case, rank), strict=True
    ):
        for what, got, hosted in (
            ("parameters", resting.parameters, wanted.model),
            ("gradients", resting.gradients, wanted.model),
            ("buffers", resting.buffers, wanted.buffers),
            ("optimizer state", resting.optimizer, wanted.optimizer),
        ):
            on = HOST if hosted else device
            if got and got != (on,):
                yield Mismatch(
                    where=f"{place} rank {rank.rank} {what}", got=", ".join(got), wanted=on
                )


def _state_too_early(case: Case, rank: RankObservation) -> Iterator[Mismatch]:
    records = (None, *rank.records)
    for place, resting, record in zip(_places(case), rank.resting, records, strict=True):
        if isinstance(record, TrainRecord) and record.stepped:
            return
        if resting.optimizer:
            where = f"{place} rank {rank.rank} optimizer state"
            yield Mismatch(where=where, got="some", wanted="none before a step")


def _yielded_elsewhere(case: Case, rank: RankObservation) -> Iterator[Mismatch]:
    for index, (action, record) in enumerate(zip(case.program, rank.records, strict=True)):
        for tensor in record.tensors if isinstance(record, ExportRecord) else ():
            if tensor.device != rank.device:
                where = f"action {index} ({action.kind}) rank {rank.rank} {tensor.name}"
                yield Mismatch(where=where, got=tensor.device, wanted=rank.device)


def _bytes_at_rest(case: Case, numerics: Numerics, rank: RankObservation) -> Iterator[Mismatch]:
    moments = 0
    for index, (place, resting, places) in enumerate(
        zip(_places(case), rank.resting, actual_places(case, rank), strict=True)
    ):
        record = rank.records[index - 1] if index else None
        if isinstance(record, TrainRecord) and record.stepped:
            moments = optimizer_bytes(case, rank)
        wanted = model_bytes(case, numerics, places)
        if resting.gradients and not places.model:
            wanted += gradient_bytes(case, numerics)
        wanted += 0 if places.optimizer else moments
        if not wanted <= resting.device_bytes <= wanted + OWN_NUMBERS:
            yield Mismatch(
                where=f"{place} rank {rank.rank} bytes on the device",
                got=str(resting.device_bytes),
                wanted=str(wanted),
            )


def _places(case: Case) -> Iterator[str]:
    yield "after the build"
    for index, action in enumerate(case.program):
        yield f"action {index} ({action.kind})"

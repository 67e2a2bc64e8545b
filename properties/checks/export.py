"""Weight export: the true weights under their names, and nothing changed by looking at them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from fsdp_engine.contract.actions import Export
from fsdp_engine.contract.case import Case
from fsdp_engine.contract.errors import UnsupportedCase
from fsdp_engine.contract.observation import (
    ExportedTensor,
    ExportRecord,
    ModuleState,
    Observation,
    Record,
    TrainRecord,
)
from fsdp_engine.contract.protocol import Run
from oracles.arrays import array_of
from oracles.bitwise import array_mismatches, part_mismatches
from oracles.export import Exported, assemble_parameters, predict_initial, predict_trained
from oracles.metamorphic import first_difference, told_mismatches, without
from oracles.verdict import Mismatch, Verdict, exactly, not_applicable


def match_oracle(case: Case, run: Run) -> Verdict:
    """Every export: the state dict's names once each, storage dtype, device, exact values.

    The order of names is the same on all ranks. Before the first step the values are the
    workload's; after one they are the engine's parameters assembled. So two exports without a step
    between them are equal too.
    """
    refusal = _not_judged(case)
    if refusal is not None:
        return refusal
    observation = run(case)
    wanted = predict_initial(case)
    mismatches: list[Mismatch] = []
    for index, action in enumerate(case.program):
        records = [rank.records[index] for rank in observation.ranks]
        if action.kind == "export":
            device = observation.ranks[0].device
            mismatches += _export_mismatches(f"action {index} (export)", records, wanted, device)
        stepped = [record for record in records if isinstance(record, TrainRecord)]
        if stepped and any(record.stepped for record in stepped):
            where = f"action {index} (train) parameter"
            assembled = assemble_parameters(
                case, [record.parameters for record in stepped], where=where
            )
            full = {name: value for name, value in assembled.full.items() if value is not None}
            mismatches += assembled.mismatches
            mismatches += [
                Mismatch(where=f"{where} {name}", got="absent", wanted="present")
                for name in assembled.full.keys() - full.keys()
            ]
            if assembled.mismatches or len(full) != len(assembled.full):
                break  # nothing to hold later exports against
            wanted = predict_trained(case, full)
    return exactly(mismatches)


def staged_equals_unstaged(case: Case, run: Run) -> Verdict:
    """The same program with every export staged, unstaged or left to the engine exports the same.

    A staging that the engine does not offer is left out; with one left there is nothing to compare.
    """
    refusal = _not_judged(case)
    if refusal is not None:
        return refusal
    observed: dict[str, Observation] = {}
    stagings: tuple[Literal["auto", "force", "skip"], ...] = ("auto", "force", "skip")
    for staging in stagings:
        try:
            observed[staging] = run(_with_staging(case, staging))
        except UnsupportedCase:
            continue
    if len(observed) < 2:
        return not_applicable("the engine offers less than two ways of staging an export")
    (first, reference), *others = observed.items()
    mismatches: list[Mismatch] = []
    for other_staging, observation in others:
        for rank, own in enumerate(observation.ranks):
            for index, record in enumerate(own.records):
                other = reference.ranks[rank].records[index]
                if isinstance(record, ExportRecord) and isinstance(other, ExportRecord):
                    where = (
                        f"action {index} (export) rank {rank} staging {other_staging} not {first}"
                    )
                    mismatches += _tensor_mismatches(where, record.tensors, other.tensors)
    return exactly(mismatches)


def changes_nothing(case: Case, run: Run) -> Verdict:
    """An export leaves the module as it was, and the rest of the program as it is without exports.

    Compared around each export: training flag, requires_grad, devices and parameter bits. Compared
    with the program without exports, bit for bit: losses, gradients, norms, parameters, outputs.
    """
    refusal = _not_judged(case)
    if refusal is not None:
        return refusal
    observation = run(case)
    mismatches: list[Mismatch] = []
    for rank, own in enumerate(observation.ranks):
        for index, record in enumerate(own.records):
            if isinstance(record, ExportRecord):
                where = f"action {index} (export) rank {rank}"
                mismatches += _state_mismatches(where, record.after, record.before)
    shorter = without(case, ("export",))
    if shorter is not None:
        told = "exports against none"
        mismatches += first_difference(shorter, observation, run(shorter.case), told=told)
    return exactly(mismatches)


def _not_judged(case: Case) -> Verdict | None:
    if case.model.lora_rank:
        return not_applicable("the export of adapters is not predicted")
    if not any(action.kind == "export" for action in case.program):
        return not_applicable("the program exports nothing")
    return None


def _with_staging(case: Case, staging: Literal["auto", "force", "skip"]) -> Case:
    program = tuple(
        Export(staging=staging) if action.kind == "export" else action for action in case.program
    )
    return dataclasses.replace(case, program=program)


def _export_mismatches(
    where: str, records: Sequence[Record], wanted: Exported, device: str
) -> list[Mismatch]:
    mismatches: list[Mismatch] = []
    orders: list[list[str]] = []
    for rank, record in enumerate(records):
        assert isinstance(record, ExportRecord)
        orders.append([tensor.name for tensor in record.tensors])
        place = f"{where} rank {rank}"
        mismatches += _name_mismatches(place, orders[-1], list(wanted.tensors))
        for tensor in record.tensors:
            if tensor.name in wanted.tensors:
                mismatches += _value_mismatches(place, tensor, wanted.tensors[tensor.name], device)
    for rank, order in enumerate(orders):
        for index, (got, first) in enumerate(zip(order, orders[0], strict=False)):
            if got != first:
                place = f"{where} rank {rank} tensor {index}"
                mismatches.append(Mismatch(where=place, got=got, wanted=f"{first} as on rank 0"))
                break
    return mismatches


def _name_mismatches(where: str, got: list[str], wanted: list[str]) -> list[Mismatch]:
    mismatches = [
        Mismatch(where=f"{where} {name}", got=f"{got.count(name)} times", wanted="once")
        for name in wanted
        if got.count(name) != 1
    ]
    mismatches += [
        Mismatch(where=f"{where} {name}", got="exported", wanted="no such name")
        for name in dict.fromkeys(got)
        if name not in wanted
    ]
    return mismatches


def _value_mismatches(
    where: str, got: ExportedTensor, wanted: Tensor, device: str
) -> list[Mismatch]:
    place = f"{where} {got.name}"
    mismatches = array_mismatches(place, got.value, array_of(wanted))
    if got.device != device:
        mismatches.append(Mismatch(where=f"{place} device", got=got.device, wanted=device))
    return mismatches


def _tensor_mismatches(
    where: str, got: Sequence[ExportedTensor], wanted: Sequence[ExportedTensor]
) -> list[Mismatch]:
    names = [[tensor.name for tensor in tensors] for tensors in (got, wanted)]
    if names[0] != names[1]:
        return [Mismatch(where=f"{where} names", got=str(names[0]), wanted=str(names[1]))]
    mismatches: list[Mismatch] = []
    for one, other in zip(got, wanted, strict=True):
        mismatches += array_mismatches(f"{where} {one.name}", one.value, other.value)
        mismatches += told_mismatches(f"{where} {one.name} device", one.device, other.device)
    return mismatches


def _state_mismatches(where: str, after: ModuleState, before: ModuleState) -> list[Mismatch]:
    return [
        *told_mismatches(f"{where} training flag after", after.training, before.training),
        *told_mismatches(f"{where} requires_grad after", after.requires_grad, before.requires_grad),
        *told_mismatches(f"{where} devices after", after.devices, before.devices),
        *part_mismatches(f"{where} parameter after", after.parameters, before.parameters),
    ]

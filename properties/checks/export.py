"""Weight export: the true weights under their names, and nothing changed by looking at them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from fsdp_engine.contract.actions import Export, Resume
from fsdp_engine.contract.case import Case
from fsdp_engine.contract.errors import UnsupportedCase
from fsdp_engine.contract.observation import (
    ExportedTensor,
    ExportRecord,
    ModuleState,
    Observation,
)
from fsdp_engine.contract.protocol import Run
from oracles.bitwise import array_mismatches, part_mismatches
from oracles.evaluation import Evaluator
from oracles.export import predict
from oracles.findings import Findings
from oracles.metamorphic import first_difference, told_mismatches, without
from oracles.moments import moments
from oracles.taking import Taking, writes
from oracles.verdict import Mismatch, Verdict, exactly, not_applicable


def match_oracle(case: Case, run: Run) -> Verdict:
    """Every export: its names once each, storage dtype, the engine's device, the call's values.

    The order of names is the same on all ranks. Before the first step the values are the
    workload's; after one they are the engine's parameters assembled. So two exports without a step
    between them are equal too. With an adapter added values are within its rounding bound, all
    others exact. An export that is not taken to its end has what was taken of it right; one that is
    taken on later has the values of its call, or is refused where weights were written since.
    """
    if not _exports(case):
        return not_applicable("the program exports nothing")
    observation = run(case)
    devices = tuple(rank.device for rank in observation.ranks)
    findings = Findings()
    held: Taking | None = None
    for moment in moments(Evaluator(case), observation):
        if isinstance(moment.action, Export):
            wanted = predict(case, moment.before.weights, moment.action)
            taking = Taking(wanted=wanted, devices=devices)
            taking.judge(moment, findings)
            held = taking if moment.action.drain == "hold" else held
        elif isinstance(moment.action, Resume):
            assert held is not None
            held.judge(moment, findings)
        elif held is not None and writes(moment):
            held.is_outdated = True
        findings.include(moment.mismatches, 0.0)
    return findings.verdict("rigorous")


def staged_equals_unstaged(case: Case, run: Run) -> Verdict:
    """The same program with every export staged, unstaged or left to the engine exports the same.

    A staging that the engine does not offer is left out; with one left there is nothing to compare.
    """
    if not _exports(case):
        return not_applicable("the program exports nothing")
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
    if not _exports(case):
        return not_applicable("the program exports nothing")
    observation = run(case)
    mismatches: list[Mismatch] = []
    for rank, own in enumerate(observation.ranks):
        for index, record in enumerate(own.records):
            if isinstance(record, ExportRecord):
                where = f"action {index} (export) rank {rank}"
                mismatches += _state_mismatches(where, record.after, record.before)
    shorter = without(case, ("export", "resume"))
    if shorter is not None:
        told = "exports against none"
        mismatches += first_difference(shorter, observation, run(shorter.case), told=told)
    return exactly(mismatches)


def _exports(case: Case) -> bool:
    return any(action.kind == "export" for action in case.program)


def _with_staging(case: Case, staging: Literal["auto", "force", "skip"]) -> Case:
    program = tuple(
        dataclasses.replace(action, staging=staging) if isinstance(action, Export) else action
        for action in case.program
    )
    return dataclasses.replace(case, program=program)


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

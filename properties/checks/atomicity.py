"""A batch that an exception ends in the middle: as if it had never begun."""

from __future__ import annotations

from fsdp_engine.contract.case import Case
from fsdp_engine.contract.observation import Observation, StateRecord, TrainRecord
from fsdp_engine.contract.protocol import Run
from oracles.metamorphic import (
    Shorter,
    first_difference,
    left_mismatches,
    told_mismatches,
    without,
)
from oracles.verdict import Mismatch, Verdict, exactly, not_applicable

_INTERRUPT = ("interrupt",)


def changes_nothing(case: Case, run: Run) -> Verdict:
    """The exception comes out, nothing has moved, and later batches give what they give without it.

    Bit for bit on every rank: parameters and optimizer state, mode and `requires_grad` after the
    interrupt; losses, gradients, norm, clipped gradients, steps and metrics of everything behind
    it; and the collectives of the next training action.
    """
    if not any(action.kind == "interrupt" for action in case.program):
        return not_applicable("the program interrupts nothing")
    observation = run(case)
    mismatches = [
        *_exception_mismatches(case, observation),
        *left_mismatches(case, observation, _INTERRUPT),
    ]
    shorter = without(case, _INTERRUPT)
    if shorter is not None:
        clean = run(shorter.case)
        told = "with interrupts against none"
        mismatches += first_difference(shorter, observation, clean, told=told)
        mismatches += _collective_mismatches(case, shorter, observation, clean)
    return exactly(mismatches)


def _exception_mismatches(case: Case, observation: Observation) -> list[Mismatch]:
    return [
        Mismatch(
            where=f"action {index} (interrupt) rank {own.rank} exception",
            got=record.raised or "none",
            wanted="InjectedFailure, or one that it caused",
        )
        for own in observation.ranks
        for index, record in enumerate(own.records)
        if case.program[index].kind == "interrupt"
        and isinstance(record, StateRecord)
        and record.injected
        and record.raised != "InjectedFailure"
    ]


def _collective_mismatches(
    case: Case, shorter: Shorter, observation: Observation, clean: Observation
) -> list[Mismatch]:
    """The communication of every training action right behind an interrupt.

    Nothing is said where a unit is optional: an engine may communicate once when one first runs.
    """
    if case.model.optional == "unit":
        return []
    found: list[Mismatch] = []
    for place, index in enumerate(shorter.kept):
        if index == 0 or case.program[index - 1].kind != "interrupt":
            continue
        for own, alone in zip(observation.ranks, clean.ranks, strict=True):
            got, wanted = own.records[index], alone.records[place]
            if not (isinstance(got, TrainRecord) and isinstance(wanted, TrainRecord)):
                continue
            where = f"action {index} (train) rank {own.rank}, collectives behind an interrupt"
            for number, pair in enumerate(zip(got.collectives, wanted.collectives, strict=False)):
                different = told_mismatches(f"{where} number {number}", *pair)
                if different:
                    found += different
                    break
            else:
                counts = [len(record.collectives) for record in (got, wanted)]
                found += told_mismatches(f"{where} count", *counts)
    return found

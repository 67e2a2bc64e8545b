"""Cases by what their micro-batches use of the model's optional part.

Micro-batches are known where planning is static. Elsewhere a predicate answers `unknown`: True
where it says what may show, False where it says what must.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

from fsdp_engine.contract.actions import Infer, Interrupt, Poison, Train
from fsdp_engine.contract.batch import Static
from fsdp_engine.contract.case import Case
from oracles.planner import consecutive

Used: TypeAlias = frozenset[str]
"""What has a gradient of the optional parts: `gated`, and with one of two parts `other`."""

_NEEDED = {
    "parameter": frozenset({"gated"}),
    "either": frozenset({"gated", "other"}),
}
"""The optional parameters of a model."""


def training(case: Case) -> Iterator[Train | Poison]:
    """The actions that train a batch to its end."""
    return (action for action in case.program if isinstance(action, Train | Poison))


def num_micro_batches(case: Case, batch: int) -> int | None:
    """How many a batch has; None where the planner decides."""
    planning = case.engine.planning
    if not isinstance(planning, Static):
        return None
    return len(case.batches[batch].ranks[0]) // planning.sequences


def used_parts(case: Case, batch: int) -> tuple[tuple[Used, ...], ...] | None:
    """By rank and micro-batch what is used; None where the planner decides."""
    planning = case.engine.planning
    if not isinstance(planning, Static):
        return None
    either = case.model.optional == "either"
    return tuple(
        tuple(
            frozenset(
                "gated" if sequences[index].gated else "other"
                for index in part
                if sequences[index].gated or either
            )
            for part in consecutive(len(sequences), planning.sequences)
        )
        for sequences in case.batches[batch].ranks
    )


def loss_tokens(case: Case, batch: int) -> tuple[int, ...]:
    """Loss tokens of the first rank's micro-batches; nothing where the planner decides."""
    planning = case.engine.planning
    if not isinstance(planning, Static):
        return ()
    sequences = case.batches[batch].ranks[0]
    plan = consecutive(len(sequences), planning.sequences)
    return tuple(sum(sequences[index].loss_tokens for index in part) for part in plan)


def accumulates(case: Case, *, unknown: bool) -> bool:
    """Deferred sync with more than one micro-batch."""
    if not case.engine.deferred:
        return False
    counts = [num_micro_batches(case, action.batch) for action in training(case)]
    return any(unknown if count is None else count > 1 for count in counts)


def skips_unit_in_the_last(case: Case, *, unknown: bool) -> bool:
    """Deferred sync, and the optional unit runs in an earlier but not in the last micro-batch."""
    if case.model.optional != "unit" or not case.engine.deferred:
        return False
    for action in training(case):
        ranks = used_parts(case, action.batch)
        if ranks is None:
            return unknown
        if any(any(parts[:-1]) and not parts[-1] for parts in ranks):
            return True
    return False


def runs_unit_late(case: Case, *, unknown: bool) -> bool:
    """Deferred sync, and the optional unit has not run yet at the end of an earlier micro-batch."""
    if case.model.optional != "unit" or not case.engine.deferred:
        return False
    for action in case.program:
        if isinstance(action, Infer):
            if any(sequence.gated for sequence in case.batches[action.batch].sequences):
                return False
        elif isinstance(action, Train | Poison | Interrupt):
            ranks = used_parts(case, action.batch)
            if ranks is None:
                return unknown
            if any(len(parts) > 1 and not parts[0] for parts in ranks):
                return True
            if any(any(parts) for parts in ranks):
                return False
    return False


def uses_first_in_the_last(case: Case, *, unknown: bool) -> bool:
    """Deferred sync, and an optional parameter is used in the last micro-batch alone."""
    if case.model.optional not in _NEEDED or not case.engine.deferred:
        return False
    for action in training(case):
        ranks = used_parts(case, action.batch)
        if ranks is None:
            return unknown
        if any(len(parts) > 1 and parts[-1] - _union(parts[:-1]) for parts in ranks):
            return True
    return False


def uses_on_some_ranks(case: Case, *, equal_sizes: bool, unknown: bool) -> bool:
    """Optional parameters have a gradient on some ranks only where gradients are reduced.

    `equal_sizes`: all ranks have as many elements to reduce, always; else, at least once not.
    """
    if case.model.optional not in _NEEDED:
        return False
    sizes_differ = sets_differ = False
    for action in training(case):
        ranks = used_parts(case, action.batch)
        if ranks is None:
            return unknown and not equal_sizes
        if case.engine.deferred:
            ranks = tuple((_union(parts),) for parts in ranks)
        for at_once in zip(*ranks, strict=True):
            sets_differ |= len(set(at_once)) > 1
            sizes_differ |= len(set(map(len, at_once))) > 1
    return sets_differ and not sizes_differ if equal_sizes else sizes_differ


def steps_without_use(case: Case, *, unknown: bool) -> bool:
    """A step after a batch in which no rank uses an optional parameter of a unit that runs."""
    needed = _NEEDED.get(case.model.optional)
    if needed is None:
        return False
    for action in case.program:
        if isinstance(action, Train) and action.step:
            ranks = used_parts(case, action.batch)
            if ranks is None:
                return unknown
            if needed - _union(map(_union, ranks)):
                return True
    return False


def _union(parts: Iterable[Used]) -> Used:
    return frozenset[str]().union(*parts)

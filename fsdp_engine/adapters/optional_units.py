"""Whether FSDP can run a case's optional unit: forward gathers a unit on all ranks or on none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from fsdp_engine.contract.actions import BATCH_ACTIONS, Infer
from fsdp_engine.contract.case import Case

Plan: TypeAlias = tuple[tuple[int, ...], ...]
"""Sequence indices per micro-batch of one rank."""

Planner: TypeAlias = Callable[[tuple[tuple[int, ...], ...]], Sequence[Plan]]
"""From the lengths of every rank's sequences to every rank's plan."""


def run_the_same_units(case: Case, planner: Planner) -> bool:
    """Whether every micro-batch, and every inference, runs the unit on all ranks or on none."""
    for action in case.program:
        if not isinstance(action, BATCH_ACTIONS):
            continue
        ranks = case.batches[action.batch].ranks
        if isinstance(action, Infer):
            plans: Sequence[Plan] = [(tuple(range(len(rank))),) for rank in ranks]
        else:
            plans = planner(tuple(tuple(s.length for s in rank) for rank in ranks))
        runs = {
            tuple(any(rank[index].gated for index in part) for part in plan)
            for rank, plan in zip(ranks, plans, strict=True)
        }
        if len(runs) > 1:
            return False
    return True

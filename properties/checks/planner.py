"""The split of a batch into micro-batches."""

from __future__ import annotations

from fsdp_engine.contract.case import Case
from fsdp_engine.contract.protocol import Run
from oracles.planner import plan_mismatches
from oracles.records import train_actions
from oracles.verdict import Mismatch, Verdict, exactly, not_applicable


def is_exact_partition(case: Case, run: Run) -> Verdict:
    """Every sequence of a rank in exactly one micro-batch, none empty, as many on every rank.

    Groups stay together. Static: consecutive sequences. Token budget: a number of micro-batches
    that the fullest rank needs, each within the budget unless a rank has no group left to split.
    """
    observation = run(case)
    actions = train_actions(case, observation)
    if not actions:
        return not_applicable("no training action")
    mismatches: list[Mismatch] = []
    for action in actions:
        plans = [record.plan for record in action.records]
        mismatches += plan_mismatches(
            str(action), case.batches[action.batch], case.engine.planning, plans
        )
    return exactly(mismatches)

"""What a split into micro-batches must keep, whatever the engine's way of balancing them.

Every sequence of a rank is in one micro-batch, a group in the same one, none is empty, and all
ranks have the same number of micro-batches, because forward and backward communicate. How many a
token budget makes is bounded on both sides; which groups go together is the engine's choice.
"""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_engine.contract.batch import Batch, Planning, Static, TokenBudget
from oracles.verdict import Mismatch

Plan = tuple[tuple[int, ...], ...]


def plan_mismatches(
    where: str, batch: Batch, planning: Planning, plans: Sequence[Plan]
) -> list[Mismatch]:
    """Judge the plans of all ranks, in rank order."""
    mismatches: list[Mismatch] = []
    for rank, plan in enumerate(plans):
        place = f"{where} rank {rank} plan"
        mismatches += _partition_mismatches(place, plan, len(batch.ranks[rank]))
        mismatches += _group_mismatches(place, plan, planning.group)
        if len(plan) != len(plans[0]):
            wanted = f"{len(plans[0])} as on rank 0"
            mismatches.append(
                Mismatch(where=f"{place} micro-batches", got=str(len(plan)), wanted=wanted)
            )
    if mismatches:
        return mismatches
    if isinstance(planning, Static):
        for rank, plan in enumerate(plans):
            wanted_plan = consecutive(len(batch.ranks[rank]), planning.sequences)
            if plan != wanted_plan:
                mismatches.append(
                    Mismatch(
                        where=f"{where} rank {rank} plan", got=str(plan), wanted=str(wanted_plan)
                    )
                )
        return mismatches
    return _budget_mismatches(where, batch, planning, plans)


def consecutive(num_sequences: int, size: int) -> Plan:
    """Sequences in order, `size` to a micro-batch."""
    indices = tuple(range(num_sequences))
    return tuple(indices[start : start + size] for start in range(0, num_sequences, size))


def token_counts(batch: Batch) -> list[int]:
    """Tokens per rank, without padding."""
    return [sum(sequence.length for sequence in rank) for rank in batch.ranks]


def fewest_micro_batches(batch: Batch, planning: TokenBudget) -> int:
    """No split within the budget has fewer: the fullest rank's tokens over the budget.

    A rank with fewer groups than that caps it, for no micro-batch is empty.
    """
    fullest = -(-max(token_counts(batch)) // planning.max_tokens)
    return min(fullest, _fewest_groups(batch, planning))


def most_micro_batches(batch: Batch, planning: TokenBudget) -> int:
    """No rank needs more.

    First come, first served, two neighbours exceed the budget together. Longest first, each to the
    lightest of this many: a group over half the budget is alone, and any other meets at most the
    mean load, which is half the budget.
    """
    neighbours = -(-2 * max(token_counts(batch)) // planning.max_tokens)
    return max(1, min(neighbours, _fewest_groups(batch, planning)))


def _fewest_groups(batch: Batch, planning: Planning) -> int:
    return min(map(len, batch.ranks)) // planning.group


def _partition_mismatches(where: str, plan: Plan, num_sequences: int) -> list[Mismatch]:
    mismatches = [
        Mismatch(where=f"{where} micro-batch {number}", got="empty", wanted="some sequence")
        for number, part in enumerate(plan)
        if not part
    ]
    planned = [index for part in plan for index in part]
    if not plan:
        mismatches.append(Mismatch(where=where, got="no micro-batch", wanted="at least one"))
    mismatches += [
        Mismatch(
            where=f"{where} sequence {index}", got=f"{planned.count(index)} times", wanted="once"
        )
        for index in range(num_sequences)
        if planned.count(index) != 1
    ]
    mismatches += [
        Mismatch(where=f"{where} sequence {index}", got="planned", wanted=f"one of {num_sequences}")
        for index in sorted(set(planned))
        if not 0 <= index < num_sequences
    ]
    return mismatches


def _group_mismatches(where: str, plan: Plan, group: int) -> list[Mismatch]:
    """Groups are consecutive sequences of the rank's batch."""
    homes: dict[int, set[int]] = {}
    for number, part in enumerate(plan):
        for index in part:
            homes.setdefault(index // group, set()).add(number)
    return [
        Mismatch(
            where=f"{where} group of sequences {at * group} to {at * group + group - 1}",
            got=f"in micro-batches {sorted(numbers)}",
            wanted="in one",
        )
        for at, numbers in sorted(homes.items())
        if group > 1 and len(numbers) > 1
    ]


def _budget_mismatches(
    where: str, batch: Batch, planning: TokenBudget, plans: Sequence[Plan]
) -> list[Mismatch]:
    count, max_tokens = len(plans[0]), planning.max_tokens
    low, high = fewest_micro_batches(batch, planning), most_micro_batches(batch, planning)
    mismatches = []
    if not low <= count <= high:
        wanted = f"{low} to {high} for {token_counts(batch)} tokens, {max_tokens} at a time"
        mismatches.append(Mismatch(where=f"{where} micro-batches", got=str(count), wanted=wanted))
    capped = count == _fewest_groups(batch, planning)  # a rank has no group left to split
    for rank, plan in enumerate(plans):
        if capped and count < -(-2 * token_counts(batch)[rank] // max_tokens):
            continue  # not even an even split is sure to fit
        for number, part in enumerate(plan):
            tokens = sum(batch.ranks[rank][index].length for index in part)
            if tokens > max_tokens:
                mismatches.append(
                    Mismatch(
                        where=f"{where} rank {rank} micro-batch {number}",
                        got=f"{tokens} tokens",
                        wanted=f"at most {max_tokens}",
                    )
                )
    return mismatches

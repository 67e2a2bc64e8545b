"""Split a rank's batch into micro-batches, the same number of them on every rank.

FSDP's collectives are issued by forward and backward, so ranks with different numbers of
micro-batches wait for each other for ever. Every plan is therefore agreed, and what is illegal on
one rank is refused on all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from fsdp_engine.contract.errors import ConfigError
from fsdp_engine.engine.config import EngineConfig

Plan = tuple[tuple[int, ...], ...]
"""Sequence indices per micro-batch: an exact partition, no part empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What one rank, or the most demanding of all ranks, brings to the agreement.

    `micro_batches` it would make alone, `fewest` and `fewest_groups` the least of all ranks,
    `longest` the tokens of its longest group, `remainder` sequences that fill no group or static
    micro-batch.
    """

    micro_batches: int
    fewest: int
    fewest_groups: int
    longest: int
    remainder: int


def plan_batch(
    lengths: tuple[int, ...], config: EngineConfig, device: torch.device
) -> tuple[Plan, tuple[str, ...]]:
    """The rank's plan and what is to be said about it. A collective call: one all-reduce.

    Static: in order, `micro_batch_size_per_gpu` sequences each. Dynamic: as many micro-batches as
    the most demanding rank needs to keep the sum of lengths of each of its micro-batches within
    `max_token_len_per_gpu`; then every micro-batch of every rank is within it. One exception: if a
    rank has fewer groups than that, there are as many micro-batches as it has groups, since none
    may be empty, and others may exceed the budget; a note says which do. A group is
    `force_group_size` consecutive sequences, which stay together.

    Raises:
        ConfigError: on all ranks. Static: numbers of sequences that differ between the ranks or
            are not a multiple of the size. Dynamic: a group longer than the budget, a number of
            sequences that is not a multiple of the group's.
    """
    agreed = _agree(local_need(lengths, config), device)
    require_plannable(agreed, config)
    if not config.use_dynamic_bsz:
        return static_plan(len(lengths), config.micro_batch_size_per_gpu), ()
    budget = _budget(config)
    plan = dynamic_plan(lengths, min(agreed.micro_batches, agreed.fewest_groups), config)
    loads = [sum(lengths[index] for index in part) for part in plan]
    notes = tuple(
        f"micro-batch {number} has {load} tokens, over max_token_len_per_gpu={budget}: a rank has "
        f"only {agreed.fewest_groups} groups of {config.force_group_size} sequences"
        for number, load in enumerate(loads)
        if load > budget
    )
    return plan, notes


def plans_of(
    lengths_by_rank: tuple[tuple[int, ...], ...], config: EngineConfig
) -> tuple[Plan, ...]:
    """Every rank's plan, worked out in one process: what `plan_batch` gives where it gives one."""
    if not config.use_dynamic_bsz:
        size = config.micro_batch_size_per_gpu
        return tuple(static_plan(len(lengths), size) for lengths in lengths_by_rank)
    needs = [local_need(lengths, config) for lengths in lengths_by_rank]
    most = max(need.micro_batches for need in needs)
    count = min(most, *(need.fewest_groups for need in needs))
    return tuple(dynamic_plan(lengths, count, config) for lengths in lengths_by_rank)


def local_need(lengths: tuple[int, ...], config: EngineConfig) -> Need:
    """What this rank brings to the agreement."""
    groups = _group_lengths(lengths, config.force_group_size)
    if config.use_dynamic_bsz:
        budget = _budget(config)
        fits = max(groups, default=0) <= budget
        count = len(_fitting(groups, budget)) if fits else 1
        remainder = len(lengths) % config.force_group_size
    else:
        count, remainder = divmod(len(lengths), config.micro_batch_size_per_gpu)
    return Need(
        micro_batches=count,
        fewest=count,
        fewest_groups=len(groups),
        longest=max(groups, default=0),
        remainder=remainder,
    )


def require_plannable(agreed: Need, config: EngineConfig) -> None:
    """Refuse what cannot be planned; `agreed` is the same on all ranks, so all refuse."""
    if agreed.fewest_groups < 1:
        raise ConfigError("batch: a rank has 0 sequences; legal is at least one on every rank")
    if config.use_dynamic_bsz:
        if agreed.remainder:
            raise ConfigError(
                f"force_group_size: {config.force_group_size} is not legal; legal is a divisor of "
                "every rank's number of sequences"
            )
        if agreed.longest > _budget(config):
            raise ConfigError(
                f"max_token_len_per_gpu: {_budget(config)} is not legal; legal is at least the "
                f"longest group of {config.force_group_size} sequences, {agreed.longest}"
            )
    elif agreed.remainder or agreed.fewest != agreed.micro_batches:
        raise ConfigError(
            f"micro_batch_size_per_gpu: {config.micro_batch_size_per_gpu} is not legal; legal is a "
            f"divisor of every rank's number of sequences, the same number on all ranks "
            f"({agreed.fewest} to {agreed.micro_batches} micro-batches)"
        )


def static_plan(num_sequences: int, size: int) -> Plan:
    """Consecutive sequences, `size` at a time."""
    return tuple(tuple(range(start, start + size)) for start in range(0, num_sequences, size))


def dynamic_plan(lengths: tuple[int, ...], count: int, config: EngineConfig) -> Plan:
    """`count` parts of about equal sums of lengths, made of whole groups."""
    size = config.force_group_size
    parts = balanced_plan(_group_lengths(lengths, size), count, _budget(config))
    return tuple(
        tuple(group * size + place for group in part for place in range(size)) for part in parts
    )


def _group_lengths(lengths: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Tokens of every `size` consecutive sequences; what fills no group is one of its own."""
    return tuple(sum(lengths[start : start + size]) for start in range(0, len(lengths), size))


def balanced_plan(lengths: tuple[int, ...], count: int, budget: int) -> Plan:
    """`count` parts of about equal sums of lengths, `1 <= count <= len(lengths)`.

    Every sum is at most `budget` if any `count` at most as large made that possible.
    """
    parts = _longest_first(lengths, count)
    if _heaviest(lengths, parts) > budget:
        fitting = _fitting(lengths, budget)
        # More parts are not always lighter parts; parts that fit stay fitting when split.
        while len(fitting) < count:
            heaviest = max((p for p in fitting if len(p) > 1), key=lambda p: _load(lengths, p))
            fitting.remove(heaviest)
            fitting += [heaviest[:1], heaviest[1:]]
        if len(fitting) == count:
            parts = fitting
    return tuple(sorted(tuple(sorted(part)) for part in parts))


def _fitting(lengths: tuple[int, ...], budget: int) -> list[list[int]]:
    """The first partition that fits the budget, of ever more parts. Each length must fit alone."""
    count = max(1, -(-sum(lengths) // budget))
    while _heaviest(lengths, parts := _longest_first(lengths, count)) > budget:
        count += 1
    return parts


def _longest_first(lengths: tuple[int, ...], count: int) -> list[list[int]]:
    """Each sequence, longest first, to the lightest part so far; ties go to the first."""
    parts: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        lightest = loads.index(min(loads))
        parts[lightest].append(index)
        loads[lightest] += lengths[index]
    return parts


def _heaviest(lengths: tuple[int, ...], parts: list[list[int]]) -> int:
    return max(_load(lengths, part) for part in parts)


def _load(lengths: tuple[int, ...], part: list[int]) -> int:
    return sum(lengths[index] for index in part)


def _agree(need: Need, device: torch.device) -> Need:
    extremes = torch.tensor(
        [need.micro_batches, -need.fewest, -need.fewest_groups, need.longest, need.remainder],
        device=device,
    )
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    most, minus_fewest, minus_groups, longest, remainder = extremes.tolist()
    return Need(
        micro_batches=most,
        fewest=-minus_fewest,
        fewest_groups=-minus_groups,
        longest=longest,
        remainder=remainder,
    )


def _budget(config: EngineConfig) -> int:
    assert config.max_token_len_per_gpu is not None  # refused by EngineConfig
    return config.max_token_len_per_gpu

"""The planner's pure parts, over every small batch."""

from __future__ import annotations

from itertools import product

import pytest

from fsdp_engine.contract.errors import ConfigError
from fsdp_engine.engine.config import EngineConfig
from fsdp_engine.engine.micro_batches import (
    Need,
    balanced_plan,
    dynamic_plan,
    local_need,
    plans_of,
    require_plannable,
    static_plan,
)

BATCHES = [lengths for size in range(1, 6) for lengths in product((1, 2, 5), repeat=size)]


def by_tokens(budget: int, group: int = 1) -> EngineConfig:
    return EngineConfig(use_dynamic_bsz=True, max_token_len_per_gpu=budget, force_group_size=group)


@pytest.mark.parametrize("budget", [5, 6, 8])
def test_plans_are_partitions_within_the_budget(budget: int) -> None:
    for lengths in BATCHES:
        needed = local_need(lengths, by_tokens(budget)).micro_batches
        assert -(-sum(lengths) // budget) <= needed <= len(lengths)
        for count in range(needed, len(lengths) + 1):
            plan = balanced_plan(lengths, count, budget)
            assert plan == balanced_plan(lengths, count, budget)
            assert len(plan) == count
            assert all(plan)
            assert sorted(index for part in plan for index in part) == list(range(len(lengths)))
            assert max(sum(lengths[i] for i in part) for part in plan) <= budget


def test_groups_stay_together_within_the_budget() -> None:
    for lengths in BATCHES:
        if len(lengths) % 2:
            continue
        config = by_tokens(10, group=2)
        pairs = [set(range(at, at + 2)) for at in range(0, len(lengths), 2)]
        needed = local_need(lengths, config).micro_batches
        assert -(-sum(lengths) // 10) <= needed <= len(pairs)
        for count in range(needed, len(pairs) + 1):
            plan = dynamic_plan(lengths, count, config)
            assert len(plan) == count
            assert sorted(index for part in plan for index in part) == list(range(len(lengths)))
            assert all(any(pair <= set(part) for part in plan) for pair in pairs)
            assert max(sum(lengths[i] for i in part) for part in plan) <= 10


def test_every_rank_plans_alike() -> None:
    """The fullest rank's need, capped by the groups of the shortest."""
    lengths = ((3, 2, 2, 2, 1, 1), (1, 1, 1, 1))
    assert plans_of(lengths, by_tokens(5, group=2)) == (((0, 1), (2, 3, 4, 5)), ((0, 1), (2, 3)))


def test_fewer_parts_than_the_budget_needs_are_still_a_partition() -> None:
    assert balanced_plan((5, 5, 5), 2, 5) == ((0, 2), (1,))


def test_parts_that_fit_stay_fitting_where_more_parts_would_not() -> None:
    """Longest first into three parts exceeds 12 here, into two it does not."""
    lengths = (7, 7, 6, 5, 5, 4, 2)
    for budget in range(7, 19):
        needed = local_need(lengths, by_tokens(budget)).micro_batches
        for count in range(needed, len(lengths) + 1):
            plan = balanced_plan(lengths, count, budget)
            assert max(sum(lengths[i] for i in part) for part in plan) <= budget


def test_parts_are_balanced() -> None:
    assert balanced_plan((4, 1, 3, 2), 2, 10) == ((0, 1), (2, 3))


def test_static_plans_are_in_order() -> None:
    assert static_plan(4, 2) == ((0, 1), (2, 3))


@pytest.mark.parametrize(
    ("config", "agreed", "named"),
    [
        (by_tokens(4), {"longest": 5}, "max_token_len_per_gpu: 4"),
        (by_tokens(4), {"fewest_groups": 0}, "0 sequences"),
        (by_tokens(4, group=3), {"remainder": 1}, "force_group_size: 3"),
        (EngineConfig(micro_batch_size_per_gpu=2), {"remainder": 1}, "micro_batch_size_per_gpu: 2"),
        (EngineConfig(), {"fewest": 1}, "micro_batch_size_per_gpu: 1"),
    ],
)
def test_what_one_rank_cannot_plan_is_refused_by_all(
    config: EngineConfig, agreed: dict[str, int], named: str
) -> None:
    fine = {"micro_batches": 2, "fewest": 2, "fewest_groups": 2, "longest": 2, "remainder": 0}
    require_plannable(Need(**fine), config)
    with pytest.raises(ConfigError, match=named):
        require_plannable(Need(**(fine | agreed)), config)

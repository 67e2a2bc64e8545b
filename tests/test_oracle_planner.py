"""The bounds on a plan, and that every broken plan is found."""

from __future__ import annotations

import dataclasses

import pytest

from fsdp_engine.contract.batch import Batch, Planning, Sequence, Static, TokenBudget
from fsdp_engine.contract.case import Case, EngineOptions
from fsdp_engine.contract.observation import Observation, Record, TrainRecord
from oracles.planner import Plan, consecutive, fewest_micro_batches, most_micro_batches
from properties.checks import planner
from tests.observed import observed, showing, spoilt, worked_case


def case_of(planning: Planning, *lengths: tuple[int, ...]) -> Case:
    ranks = tuple(
        tuple(Sequence(key=100 * rank + index, length=n) for index, n in enumerate(own))
        for rank, own in enumerate(lengths)
    )
    return Case(batches=(Batch(ranks=ranks),), engine=EngineOptions(planning=planning))


def planned(*plans: Plan) -> Observation:
    observation = observed(worked_case(micro_batches=1))
    for rank, plan in enumerate(plans):

        def change(record: Record, plan: Plan = plan) -> Record:
            assert isinstance(record, TrainRecord)
            return dataclasses.replace(record, plan=plan)

        observation = spoilt(observation, rank, 0, change)
    return observation


def test_consecutive_sequences() -> None:
    assert consecutive(4, 2) == ((0, 1), (2, 3))
    assert consecutive(3, 1) == ((0,), (1,), (2,))


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "fewest", "most"),
    [
        (((3, 3), (2, 2)), 6, 1, 2),
        (((3, 3, 3), (2, 2, 2)), 6, 2, 3),
        (((3, 3, 3), (2,)), 6, 1, 1),  # a rank has one sequence only
        (((1,), (1,)), 8, 1, 1),
        (((2, 2, 2, 2), (2, 2, 2, 2)), 8, 1, 2),
    ],
)
def test_bounds(
    lengths: tuple[tuple[int, ...], ...], max_tokens: int, fewest: int, most: int
) -> None:
    planning = TokenBudget(max_tokens=max_tokens)
    batch = case_of(planning, *lengths).batches[0]
    assert fewest_micro_batches(batch, planning) == fewest
    assert most_micro_batches(batch, planning) == most


STATIC = case_of(Static(sequences=2), (1, 2, 1, 2), (1, 2, 1, 2))
DYNAMIC = case_of(TokenBudget(max_tokens=4), (3, 1, 2, 2), (1, 1, 1, 1))
GROUPED = case_of(TokenBudget(max_tokens=5, group=2), (3, 1, 2, 2), (1, 1, 1, 1))
GROUPS_IN_ORDER = case_of(Static(sequences=2, group=2), (1, 2, 1, 2), (1, 2, 1, 2))
CAPPED = case_of(TokenBudget(max_tokens=4), (3, 3, 3), (1, 1))
CAPPED_GROUPS = case_of(TokenBudget(max_tokens=3, group=2), (1, 1, 1, 1), (1, 1, 1, 1, 1, 1))
GOOD: Plan = ((0, 1), (2, 3))


@pytest.mark.parametrize(
    ("case", "plans"),
    [
        (STATIC, (GOOD, GOOD)),
        (DYNAMIC, (GOOD, GOOD)),
        (DYNAMIC, (((1, 0), (3, 2)), ((0,), (1, 2, 3)))),
        (DYNAMIC, (((0,), (1,), (2, 3)), ((0,), (1,), (2, 3)))),
        (CAPPED, (((0, 1), (2,)), ((0,), (1,)))),
        (GROUPED, (GOOD, GOOD)),
        (GROUPED, (((2, 3), (0, 1)), ((3, 2), (1, 0)))),
        (GROUPS_IN_ORDER, (GOOD, GOOD)),
        (CAPPED_GROUPS, (GOOD, ((0, 1), (2, 3, 4, 5)))),
    ],
)
def test_a_good_plan_passes(case: Case, plans: tuple[Plan, Plan]) -> None:
    assert planner.is_exact_partition(case, showing(planned(*plans))).passed


@pytest.mark.parametrize(
    ("case", "plans", "sentence"),
    [
        (STATIC, (GOOD, ((0, 1), (2,))), "rank 1 plan sequence 3: got 0 times, should be once"),
        (STATIC, (GOOD, ((0, 1), (1, 2, 3))), "rank 1 plan sequence 1: got 2 times"),
        (STATIC, (GOOD, ((0, 1), (2, 3), ())), "rank 1 plan micro-batch 2: got empty"),
        (STATIC, (GOOD, ()), "rank 1 plan: got no micro-batch"),
        (STATIC, (GOOD, ((0, 1), (2, 3, 4))), "rank 1 plan sequence 4: got planned"),
        (STATIC, (GOOD, ((0, 1, 2, 3),)), "micro-batches: got 1, should be 2 as on rank 0"),
        (STATIC, (GOOD, ((2, 3), (0, 1))), "rank 1 plan: got ((2, 3), (0, 1))"),
        (STATIC, (GOOD, ((0, 2), (1, 3))), "rank 1 plan: got ((0, 2), (1, 3))"),
        (
            GROUPED,
            (GOOD, ((0, 2), (1, 3))),
            "rank 1 plan group of sequences 0 to 1: got in micro-batches [0, 1], should be in one",
        ),
        (
            GROUPED,
            (consecutive(4, 1), consecutive(4, 1)),
            "rank 0 plan group of sequences 2 to 3: got in micro-batches [2, 3]",
        ),
        (DYNAMIC, (((0, 1, 2, 3),), ((0, 1, 2, 3),)), "micro-batches: got 1, should be 2 to 4"),
        (
            DYNAMIC,
            (((0, 2), (1, 3)), GOOD),
            "rank 0 micro-batch 0: got 5 tokens, should be at most",
        ),
    ],
)
def test_a_broken_plan_is_found(case: Case, plans: tuple[Plan, Plan], sentence: str) -> None:
    verdict = planner.is_exact_partition(case, showing(planned(*plans)))
    assert verdict.outcome == "fail"
    assert any(sentence in str(mismatch) for mismatch in verdict.mismatches)


@pytest.mark.parametrize(
    ("lengths", "fewest", "most"),
    [
        (((3, 1, 2, 2), (1, 1, 1, 1)), 2, 2),
        (((3, 1, 2, 2, 1, 1), (1, 1, 1, 1)), 2, 2),  # a rank has two groups only
        (((1, 1, 1, 1), (1, 1, 1, 1)), 1, 2),
    ],
)
def test_groups_bound_the_number(
    lengths: tuple[tuple[int, ...], ...], fewest: int, most: int
) -> None:
    planning = TokenBudget(max_tokens=5, group=2)
    batch = case_of(planning, *lengths).batches[0]
    assert fewest_micro_batches(batch, planning) == fewest
    assert most_micro_batches(batch, planning) == most


def test_more_micro_batches_than_any_rank_needs_are_found() -> None:
    case = case_of(TokenBudget(max_tokens=8), (1, 1, 1, 1), (1, 1, 1, 1))
    singles = consecutive(4, 1)
    verdict = planner.is_exact_partition(case, showing(planned(singles, singles)))
    assert "got 4, should be 1 to 1" in str(verdict.mismatches[0])

"""Sessions of so many minutes, and what they take over from earlier ones."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from fsdp_engine.contract.case import Case
from oracles.verdict import Verdict, passing
from properties.budget import RESERVE, Budget, in_order
from properties.covering import Axes
from properties.judge import Judge, PropertyFailure
from properties.profiles import PROFILES, has_failed
from properties.repro import read_case_file
from properties.strategies.cases import cases
from properties.suite import Search, over_rows
from tests.judging import WRONG, hand_on, judge_of


def test_a_budget_keeps_a_reserve_for_what_runs() -> None:
    budget = Budget.from_start(10_000.0)
    assert not budget.is_over
    assert budget.ends <= time.time() + 600_000.0 * (1.0 - RESERVE)  # it began with the process
    assert Budget(minutes=1.0, ends=time.time() - 1.0).is_over


def test_tests_come_in_an_order_of_the_seed_and_failures_first() -> None:
    names = [f"test[{n}]" for n in range(50)]

    def sort(seed: int) -> list[str]:
        keys = in_order(names, seed=seed, has_failed=lambda name: name == "test[31]")
        return sorted(names, key=lambda name: keys[name])

    assert sort(1) == sort(1)
    assert sort(1) != sort(2)
    assert sort(1)[0] == sort(2)[0] == "test[31]"
    assert sorted(sort(1)) == sorted(names)


@over_rows(cases)
def suite(case: Case, judge: Judge) -> None:
    judge(hand_on, case)


def _search(root: Path, seed: int) -> Search:
    return Search(profile=PROFILES["nightly"], seed=seed, key="a test", root=root)


def test_the_next_session_starts_from_what_failed(tmp_path: Path) -> None:
    """With another seed the first case is the one that the first session ended at."""
    seen: list[Case] = []

    def behave(case: Case) -> Verdict:
        seen.append(case)
        return WRONG if case.model.units > 1 else passing()

    row = Axes(kind="mlp")
    with pytest.raises(PropertyFailure):
        suite(row, judge_of(tmp_path / "repro", behave), _search(tmp_path, 3))
    (path,) = (tmp_path / "repro").glob("*.json")
    smallest = read_case_file(path.read_text()).case
    assert has_failed(tmp_path, "a test")
    assert not has_failed(tmp_path, "another test")
    seen.clear()
    with pytest.raises(PropertyFailure):
        suite(row, judge_of(tmp_path / "repro", behave), _search(tmp_path, 4))
    assert seen[0] == smallest


OVER = Budget(minutes=1.0, ends=0.0)


def test_a_search_ends_with_the_budget(tmp_path: Path) -> None:
    """With what it has found; where that is nothing, without a failure."""
    seen: list[Case] = []

    def behave(case: Case) -> Verdict:
        seen.append(case)
        judge.budget = OVER
        return WRONG

    judge = judge_of(tmp_path / "repro", behave)
    with pytest.raises(PropertyFailure):
        suite(Axes(kind="qwen2"), judge, _search(tmp_path, 3))
    assert len(seen) == 2  # once warm, once in a fresh world
    none = judge_of(tmp_path / "repro", behave)
    none.budget = OVER
    suite(Axes(kind="qwen2"), none, _search(tmp_path / "unfound", 5))
    assert len(seen) == 2
    assert not any(path.is_file() for path in (tmp_path / "unfound").rglob("*"))

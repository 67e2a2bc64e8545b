"""The judge inside a search: failures stay apart and shrink, hangs are rationed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from fsdp_engine.contract.batch import TokenBudget
from fsdp_engine.contract.case import DTYPE_POLICIES, Case, EngineOptions
from fsdp_engine.contract.errors import UnsupportedCase
from fsdp_engine.contract.model import Model
from oracles.verdict import Verdict, not_applicable, passing
from properties.covering import Axes
from properties.judge import MAX_HANGS, MAX_REDRAWN, Judge, PropertyFailure
from properties.profiles import PROFILES
from properties.repro import read_case_file
from properties.strategies.cases import cases, exporting_cases, stepping_cases
from properties.suite import Search, over_rows
from tests.judging import CASE, HAND_ON, HANG, RAISED, WRONG, FakeWorlds, hand_on, judge_of, raising

SETTINGS = settings(
    max_examples=50,
    database=None,
    report_multiple_bugs=True,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)

# Simple cases, so that a search costs little.
CASES = st.builds(
    replace,
    st.just(CASE),
    seed=st.integers(0, 99),
    model=st.builds(Model, units=st.integers(1, 3)),
)


def test_hangs_are_rationed_while_shrinking(tmp_path: Path) -> None:
    judge = judge_of(tmp_path, raising(HANG))

    @SETTINGS
    @given(case=CASES)
    def search(case: Case) -> None:
        judge(hand_on, case)

    with pytest.raises(PropertyFailure, match="inconclusive"):
        search()
    assert cast(FakeWorlds, judge.trial.worlds).num_runs <= 2 * MAX_HANGS


def test_shrinking_does_not_slip_to_another_failure(tmp_path: Path) -> None:
    """Small cases crash, larger ones are wrong: both stay apart."""

    def behave(case: Case) -> Verdict:
        if case.model.units == 1:
            raise RAISED
        return WRONG

    judge = judge_of(tmp_path, behave)
    smallest: dict[str, int] = {}

    @SETTINGS
    @given(case=CASES)
    def search(case: Case) -> None:
        try:
            judge(hand_on, case)
        except PropertyFailure as failure:
            name = type(failure).__name__.removeprefix("Tests.judgingHand_on")
            smallest[name] = case.model.units
            raise

    with pytest.raises(ExceptionGroup) as caught:
        search()
    assert len(caught.value.exceptions) == 2
    assert smallest == {"Failed": 2, "RaisedZeroDivisionError": 1}


def test_the_margin_is_climbed(tmp_path: Path) -> None:
    judge = judge_of(tmp_path, lambda _: passing(margin=0.25))
    targets: list[float] = []

    @settings(max_examples=5, database=None)
    @given(seed=st.integers(0, 9))
    def search(seed: int) -> None:
        judge(hand_on, Case(batches=CASE.batches, seed=seed))
        with pytest.raises(hypothesis.errors.InvalidArgument):
            hypothesis.target(1.0, label=HAND_ON)  # was set already
        targets.append(1.0)

    search()
    assert targets


def _of_one_seed(case: Case) -> Verdict:
    """Half of the cases are refused, by the engine or by the check."""
    if case.seed % 4 == 1:
        raise UnsupportedCase("an odd seed")
    return not_applicable("an odd seed") if case.seed % 2 else passing()


def _of_none(case: Case) -> Verdict:
    raise UnsupportedCase(f"seed {case.seed}")


@pytest.mark.parametrize(
    ("behave", "judged", "most"), [(_of_one_seed, 5, MAX_REDRAWN), (_of_none, 0, MAX_REDRAWN + 5)]
)
def test_another_case_is_drawn_for_a_refused_one(
    tmp_path: Path, behave: Callable[[Case], Verdict], judged: int, most: int
) -> None:
    judge = judge_of(tmp_path, behave)

    @hypothesis.seed(3)
    @settings(SETTINGS, max_examples=5)
    @given(case=CASES)
    def search(case: Case) -> None:
        judge(hand_on, case)

    search()
    tally = judge.tallies[HAND_ON]
    assert tally.judged == judged
    assert 0 < sum(tally.not_applicable.values()) <= most


def shrunk(draw: Callable[[Axes], SearchStrategy[Case]], row: Axes, folder: Path) -> Case:
    """The case a suite over the row ends at whose check always fails, read from its repro."""

    @over_rows(draw)
    def always_fails(case: Case, judge: Judge) -> None:
        judge(hand_on, case)

    repro = folder / "repro"
    judge = judge_of(repro, lambda _: WRONG)
    search = Search(profile=PROFILES["default"], seed=7, key=str(row), root=folder)
    with pytest.raises(PropertyFailure) as caught:
        always_fails(row, judge, search)
    (path,) = repro.glob("*.json")
    assert str(path) in str(caught.value)
    return read_case_file(path.read_text()).case


@pytest.mark.parametrize("draw", [cases, stepping_cases, exporting_cases], ids=lambda d: d.__name__)
def test_a_check_that_always_fails_ends_at_the_simplest_case(
    tmp_path: Path, draw: Callable[[Axes], SearchStrategy[Case]]
) -> None:
    """World 2, one unit, one micro-batch, fp32, no adapter, one action of the suite's kind."""
    found = shrunk(draw, Axes(), tmp_path)
    assert len(found.program) == 1
    assert replace(found, program=CASE.program) == CASE


def test_a_row_of_everything_keeps_its_row_and_nothing_else(tmp_path: Path) -> None:
    row = Axes(
        strategy="fsdp1",
        reshard="zero2",
        sync="deferred",
        mesh="grid",
        dtypes="bf16/bf16/fp32",
        kind="tied",
        adapter="lora",
        planning="token_budget",
    )
    found = shrunk(stepping_cases, row, tmp_path)
    assert found.mesh.shape == (2, 2)
    assert found.model == Model(family="embedding", tied=True, lora_rank=2)
    assert found.dtypes == DTYPE_POLICIES["bf16/bf16/fp32"]
    assert found.engine == EngineOptions(
        strategy="fsdp1",
        reshard_after_forward=False,
        deferred=True,
        planning=TokenBudget(max_tokens=found.engine.planning.max_tokens),  # type: ignore[union-attr]  # of this row
    )
    assert [len(rank) for rank in found.batches[0].ranks] == [1, 1, 1, 1]
    assert len(found.program) == len(found.batches) == 1
    assert found.optimizer == CASE.optimizer
    assert found.seed == 0

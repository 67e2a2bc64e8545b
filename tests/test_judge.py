"""The judge confirms, counts, writes and raises; a flake or a hang is neither pass nor guilt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias, cast

import hypothesis
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fsdp_engine.contract import case as contract
from fsdp_engine.contract.case import Case
from fsdp_engine.contract.case_file import case_id
from fsdp_engine.contract.errors import (
    EngineRaised,
    RankDied,
    RankHung,
    UnsupportedCase,
    WorldError,
)
from fsdp_engine.contract.model import Model
from fsdp_engine.contract.observation import Observation
from fsdp_engine.contract.protocol import EngineTables, Run
from oracles.verdict import Mismatch, Verdict, failing, not_applicable, passing
from properties.catalog import PROPERTIES, UnknownPropertyError, load_check, property_id
from properties.judge import MAX_HANGS, Hangs, Judge, PropertyFailure, failure_class
from properties.known_issues import KnownIssue
from properties.repro import read_case_file
from properties.strategies.cases import any_cases
from properties.strategies.tables import one_case

Behaviour: TypeAlias = Callable[[Case], Verdict]

(CASE,) = one_case()
WRONG = failing(
    *(
        Mismatch(where=f"w[{i}]", got=str(i), wanted="0", off=float(i), allowed=1.0)
        for i in range(1, 9)
    ),
    margin=8.0,
    margin_kind="rigorous",
)


class FakeWorlds:
    """Answers with a verdict where a world answers with an observation; the check hands it on."""

    def __init__(self, warm: Behaviour, fresh: Behaviour | None = None) -> None:
        self._answer = warm
        self._fresh = fresh or warm
        self.num_runs = 0

    def __call__(self, case: Case) -> Observation:
        self.num_runs += 1
        return cast(Observation, self._answer(case))

    def tables(
        self,
        *,
        mesh_shapes: tuple[tuple[int, int], ...] = (),
        strategies: tuple[tuple[int, bool], ...] = (),
    ) -> EngineTables:
        raise NotImplementedError(mesh_shapes, strategies)

    @property
    def fresh(self) -> Run:
        fresh = FakeWorlds(self._fresh)
        self.num_runs += 1
        return fresh


def hand_on(case: Case, run: Run) -> Verdict:
    """A check that says what the fake world says."""
    return cast(Verdict, run(case))


def _raising(error: Exception) -> Behaviour:
    def behave(_: Case) -> Verdict:
        raise error

    return behave


HANG = RankHung("12 s passed", stacks={0: "in all_gather"}, divergence="rank 1 is elsewhere")
RAISED = EngineRaised(
    "rank 0 raised",
    by_rank={0: "Traceback: boom", 1: "Traceback: boom"},
    kinds={0: "ZeroDivisionError", 1: "ZeroDivisionError"},
    num_collectives={0: 0, 1: 0},
)
DIED = RankDied("rank 1 ended", exit_codes={1: -11}, stacks={})


def _judge(
    folder: Path, warm: Behaviour, fresh: Behaviour | None = None, *issues: KnownIssue
) -> Judge:
    return Judge(
        worlds=FakeWorlds(warm, fresh),
        engine="fake",
        repro_folder=folder,
        known_issues=issues,
        hangs=Hangs(),
    )


def _failure(judge: Judge) -> PropertyFailure:
    with pytest.raises(PropertyFailure) as caught:
        judge(hand_on, CASE)
    return caught.value


def test_a_pass_is_counted_and_writes_nothing(tmp_path: Path) -> None:
    judge = _judge(tmp_path / "repro", lambda _: passing(margin=0.5, margin_kind="rigorous"))
    judge(hand_on, CASE)
    (tally,) = judge.tallies.values()
    assert (tally.drawn, tally.judged, tally.failed, tally.verdict) == (1, 1, 0, "pass")
    assert tally.worlds == {"2": 1}
    assert tally.case_ids == [case_id(CASE)]
    assert (tally.worst_margin, tally.margin_kind) == (0.5, "rigorous")
    assert not (tmp_path / "repro").exists()


def test_a_failure_says_everything_and_ends_with_the_command(tmp_path: Path) -> None:
    judge = _judge(tmp_path, lambda _: WRONG)
    lines = str(_failure(judge)).splitlines()
    (path,) = tmp_path.glob("*.json")
    assert path.name.startswith(case_id(CASE)[:12] + "-")
    assert lines[0].startswith("tests.test_judge:hand_on: fail (engine fake")
    assert [line.split(":")[0].strip() for line in lines[1:6]] == [
        f"w[{i}]" for i in (8, 7, 6, 5, 4)
    ]
    assert lines[6].strip() == "... and 3 more"
    assert lines[7] == "margin: 8 (rigorous; at most 1 passes)"
    example = lines[8].removeprefix("@example(case=").removesuffix(")")
    assert eval(example, vars(contract)) == CASE
    assert lines[9] == f"case file: {path}"
    assert lines[10] == f"python -m properties.replay {path} --engine fake"
    read = read_case_file(path.read_text())
    assert (read.case, read.property) == (CASE, "tests.test_judge:hand_on")
    assert len(path.with_suffix(".py").read_text().splitlines()) < 80
    assert judge.tallies["tests.test_judge:hand_on"].failed == 1


def test_a_failing_case_is_not_run_again(tmp_path: Path) -> None:
    judge = _judge(tmp_path, lambda _: WRONG)
    first = str(_failure(judge))
    runs = cast(FakeWorlds, judge.worlds).num_runs
    assert str(_failure(judge)) == first
    assert cast(FakeWorlds, judge.worlds).num_runs == runs
    assert judge.tallies["tests.test_judge:hand_on"].drawn == 1


@pytest.mark.parametrize(
    ("warm", "fresh"),
    [
        (lambda _: WRONG, lambda _: passing()),
        (_raising(RAISED), lambda _: passing()),
        (_raising(HANG), lambda _: passing()),
        (lambda _: WRONG, _raising(HANG)),
        (_raising(HANG), lambda _: WRONG),
    ],
)
def test_what_differs_in_a_fresh_world_is_a_flake(
    tmp_path: Path, warm: Behaviour, fresh: Behaviour
) -> None:
    judge = _judge(tmp_path, warm, fresh)
    failure = _failure(judge)
    assert "state leak or flake" in str(failure)
    assert type(failure).__name__.endswith("Flaked")
    (tally,) = judge.tallies.values()
    assert (tally.judged, tally.failed, tally.inconclusive) == (0, 0, 1)
    assert tally.verdict == "inconclusive"


@pytest.mark.parametrize("error", [HANG, WorldError("no rank started")], ids=["hang", "world"])
def test_a_hang_or_a_failing_world_is_never_a_pass(tmp_path: Path, error: Exception) -> None:
    judge = _judge(tmp_path, _raising(error))
    assert "inconclusive" in str(_failure(judge))
    (tally,) = judge.tallies.values()
    assert (tally.verdict, tally.judged, tally.inconclusive) == ("inconclusive", 0, 1)


@pytest.mark.parametrize(
    ("error", "told", "how"),
    [
        (
            RAISED,
            "ranks 0, 1: got Traceback: boom, should be no exception",
            "RaisedZeroDivisionError",
        ),
        (DIED, "exit codes rank 1: -11", "Died"),
    ],
)
def test_an_engine_that_raises_or_dies_has_failed(
    tmp_path: Path, error: Exception, told: str, how: str
) -> None:
    judge = _judge(tmp_path, _raising(error))
    failure = _failure(judge)
    assert told in str(failure)
    assert type(failure).__name__.endswith(how)
    assert [tally.verdict for tally in judge.tallies.values()] == ["fail"]


def test_refusals_are_counted_by_reason_and_by_whom(tmp_path: Path) -> None:
    judge = _judge(tmp_path, _raising(UnsupportedCase("no tied weights")))
    judge(hand_on, CASE)
    judge(hand_on, CASE)
    (tally,) = judge.tallies.values()
    assert (tally.drawn, tally.judged) == (2, 0)
    assert tally.not_applicable == {"no tied weights": 2}
    assert tally.unsatisfiable
    assert not tally.rows
    other = _judge(tmp_path, lambda _: not_applicable("no training action"))
    other(hand_on, CASE)
    (tally,) = other.tallies.values()
    assert (tally.verdict, tally.unsatisfiable) == ("not_applicable", False)


def test_known_issues_are_neither_pass_nor_failure(tmp_path: Path) -> None:
    issue = KnownIssue(
        id="T-1",
        engine="fake",
        property="tests.test_judge:hand_on",
        hits=lambda case: case.model.family == "linear",
        reference="https://example.org/1",
    )
    judge = _judge(tmp_path, lambda _: WRONG, None, issue)
    judge(hand_on, CASE)
    (tally,) = judge.tallies.values()
    assert (tally.verdict, tally.failed, tally.judged) == ("known_issue", 0, 1)
    assert tally.known_issue == {"T-1": 1}
    with pytest.raises(PropertyFailure):
        judge(hand_on, Case(batches=CASE.batches, model=Model(family="mlp")))


def test_hangs_are_rationed_while_shrinking(tmp_path: Path) -> None:
    judge = _judge(tmp_path, _raising(HANG))

    @settings(max_examples=50, database=None, suppress_health_check=list(HealthCheck))
    @given(case=any_cases())
    def search(case: Case) -> None:
        judge(hand_on, case)

    with pytest.raises(PropertyFailure, match="inconclusive"):
        search()
    assert cast(FakeWorlds, judge.worlds).num_runs <= 2 * MAX_HANGS


def test_shrinking_does_not_slip_to_another_failure(tmp_path: Path) -> None:
    """Small cases crash, larger ones are wrong: both stay apart."""

    def behave(case: Case) -> Verdict:
        if case.model.units == 1:
            raise RAISED
        return WRONG

    judge = _judge(tmp_path, behave)
    seen: set[str] = set()

    @settings(
        max_examples=50,
        database=None,
        report_multiple_bugs=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=any_cases())
    def search(case: Case) -> None:
        try:
            judge(hand_on, case)
        except PropertyFailure as failure:
            seen.add(type(failure).__name__)
            raise

    with pytest.raises((PropertyFailure, ExceptionGroup)):
        search()
    assert {name.removeprefix("Tests.test_judgeHand_on") for name in seen} == {
        "Failed",
        "RaisedZeroDivisionError",
    }


def test_each_property_and_way_to_fail_has_one_class() -> None:
    assert failure_class("a-b", "Failed") is failure_class("a-b", "Failed")
    assert failure_class("a-b", "Failed").__name__ == "ABFailed"
    classes = {failure_class(name, how) for name in PROPERTIES for how in ("Failed", "Hung")}
    assert len(classes) == 2 * len(PROPERTIES)


def test_the_margin_is_climbed(tmp_path: Path) -> None:
    judge = _judge(tmp_path, lambda _: passing(margin=0.25))
    targets: list[float] = []

    @settings(max_examples=5, database=None)
    @given(seed=st.integers(0, 9))
    def search(seed: int) -> None:
        judge(hand_on, Case(batches=CASE.batches, seed=seed))
        with pytest.raises(hypothesis.errors.InvalidArgument):
            hypothesis.target(1.0, label="tests.test_judge:hand_on")  # was set already
        targets.append(1.0)

    search()
    assert targets


def test_every_property_has_a_check_and_a_stable_name() -> None:
    for name in PROPERTIES:
        assert property_id(load_check(name)) == name
    assert load_check("tests.test_judge:hand_on") is not None
    for bad in ("no-such-property", "tests.nothing:x", "tests.test_judge:nothing", ":", "os"):
        with pytest.raises(UnknownPropertyError, match="property"):
            load_check(bad)

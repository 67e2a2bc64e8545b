"""The judge confirms, counts, writes and raises; a flake or a hang is neither pass nor guilt."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from fsdp_engine.contract.case import Case
from fsdp_engine.contract.case_file import case_id
from fsdp_engine.contract.errors import UnsupportedCase, WorldError
from fsdp_engine.contract.model import Model
from oracles.verdict import not_applicable, passing
from properties.catalog import PROPERTIES, UnknownPropertyError, load_check, property_id
from properties.issues.issue import KnownIssue
from properties.judge import Judge, PropertyFailure, failure_class
from properties.repro import read_case_file
from tests.judging import (
    CASE,
    DIED,
    HAND_ON,
    HANG,
    RAISED,
    WRONG,
    Behaviour,
    FakeWorlds,
    hand_on,
    judge_of,
    raising,
)
from tests.small_cases import CASE_NAMES


def _failure(judge: Judge) -> PropertyFailure:
    with pytest.raises(PropertyFailure) as caught:
        judge(hand_on, CASE)
    return caught.value


def test_a_pass_is_counted_and_writes_nothing(tmp_path: Path) -> None:
    judge = judge_of(tmp_path / "repro", lambda _: passing(margin=0.5, margin_kind="rigorous"))
    judge(hand_on, CASE)
    (tally,) = judge.tallies.values()
    assert (tally.drawn, tally.judged, tally.failed, tally.verdict) == (1, 1, 0, "pass")
    assert tally.worlds == {"2": 1}
    assert tally.case_ids == [case_id(CASE)]
    assert (tally.worst_margin, tally.margin_kind) == (0.5, "rigorous")
    assert not (tmp_path / "repro").exists()


def test_a_failure_says_everything_and_ends_with_the_command(tmp_path: Path) -> None:
    judge = judge_of(tmp_path, lambda _: WRONG)
    lines = str(_failure(judge)).splitlines()
    (path,) = tmp_path.glob("*.json")
    assert path.name.startswith(case_id(CASE)[:12] + "-")
    assert lines[0].startswith(f"{HAND_ON}: fail (engine fake")
    assert [line.split(":")[0].strip() for line in lines[1:6]] == [
        f"w[{i}]" for i in (8, 7, 6, 5, 4)
    ]
    assert lines[6].strip() == "... and 3 more"
    assert lines[7] == "margin: 8 (rigorous; at most 1 passes)"
    example = lines[8].removeprefix("@example(case=").removesuffix(")")
    assert eval(example, CASE_NAMES) == CASE
    assert lines[9] == f"case file: {path}"
    assert lines[10] == f"python -m properties.replay {path} --engine fake"
    read = read_case_file(path.read_text())
    assert (read.case, read.property) == (CASE, HAND_ON)
    assert len(path.with_suffix(".py").read_text().splitlines()) < 80
    assert judge.tallies[HAND_ON].failed == 1


def test_a_failing_case_is_not_run_again(tmp_path: Path) -> None:
    judge = judge_of(tmp_path, lambda _: WRONG)
    first = str(_failure(judge))
    runs = cast(FakeWorlds, judge.trial.worlds).num_runs
    assert str(_failure(judge)) == first
    assert cast(FakeWorlds, judge.trial.worlds).num_runs == runs
    assert judge.tallies[HAND_ON].drawn == 1


@pytest.mark.parametrize(
    ("warm", "fresh"),
    [
        (lambda _: WRONG, lambda _: passing()),
        (raising(RAISED), lambda _: passing()),
        (raising(HANG), lambda _: passing()),
        (lambda _: WRONG, raising(HANG)),
        (raising(HANG), lambda _: WRONG),
    ],
)
def test_what_differs_in_a_fresh_world_is_a_flake(
    tmp_path: Path, warm: Behaviour, fresh: Behaviour
) -> None:
    judge = judge_of(tmp_path, warm, fresh)
    failure = _failure(judge)
    assert "state leak or flake" in str(failure)
    assert type(failure).__name__.endswith("Flaked")
    (tally,) = judge.tallies.values()
    assert (tally.judged, tally.failed, tally.inconclusive) == (0, 0, 1)
    assert tally.verdict == "inconclusive"


@pytest.mark.parametrize("error", [HANG, WorldError("no rank started")], ids=["hang", "world"])
def test_a_hang_or_a_failing_world_is_never_a_pass(tmp_path: Path, error: Exception) -> None:
    judge = judge_of(tmp_path, raising(error))
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
    judge = judge_of(tmp_path, raising(error))
    failure = _failure(judge)
    assert told in str(failure)
    assert type(failure).__name__.endswith(how)
    assert [tally.verdict for tally in judge.tallies.values()] == ["fail"]


def test_refusals_are_counted_by_reason_and_by_whom(tmp_path: Path) -> None:
    judge = judge_of(tmp_path, raising(UnsupportedCase("no tied weights")))
    judge(hand_on, CASE)
    judge(hand_on, CASE)
    (tally,) = judge.tallies.values()
    assert (tally.drawn, tally.judged) == (2, 0)
    assert tally.not_applicable == {"no tied weights": 2}
    assert tally.unsatisfiable
    assert not tally.rows
    other = judge_of(tmp_path, lambda _: not_applicable("no training action"))
    other(hand_on, CASE)
    (tally,) = other.tallies.values()
    assert (tally.verdict, tally.unsatisfiable) == ("not_applicable", False)


def test_known_issues_are_neither_pass_nor_failure(tmp_path: Path) -> None:
    def hits(case: Case) -> bool:
        return case.model.family == "linear"

    issue = KnownIssue(
        id="T-1",
        engines=("fake",),
        properties=(HAND_ON,),
        reason="it is so",
        hits=hits,
        must=hits,
        ends=("Failed",),
        reference="https://example.org/1",
    )
    judge = judge_of(tmp_path, lambda _: WRONG, None, issue)
    judge(hand_on, CASE)
    (tally,) = judge.tallies.values()
    assert (tally.verdict, tally.failed, tally.judged) == ("known_issue", 0, 1)
    assert tally.known_issue == {"T-1": 1}
    with pytest.raises(PropertyFailure):
        judge(hand_on, Case(batches=CASE.batches, model=Model(family="mlp")))


def test_each_property_and_way_to_fail_has_one_class() -> None:
    assert failure_class("a-b", "Failed") is failure_class("a-b", "Failed")
    assert failure_class("a-b", "Failed").__name__ == "ABFailed"
    classes = {failure_class(name, how) for name in PROPERTIES for how in ("Failed", "Hung")}
    assert len(classes) == 2 * len(PROPERTIES)


def test_every_property_has_a_check_and_a_stable_name() -> None:
    for name in PROPERTIES:
        assert property_id(load_check(name)) == name
    assert load_check(HAND_ON) is not None
    for bad in ("no-such-property", "tests.nothing:x", "tests.judging:nothing", ":", "os"):
        with pytest.raises(UnknownPropertyError, match="property"):
            load_check(bad)

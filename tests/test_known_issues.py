"""Every known issue is found on its engine, and told where it no longer shows."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, cast

import pytest

from fsdp_engine.contract.case import Case
from fsdp_engine.contract.errors import UnsupportedCase
from fsdp_engine.contract.protocol import Run
from fsdp_engine.world.pool import WorldPool
from oracles.verdict import Verdict, passing
from properties.catalog import load_check
from properties.issues.issue import KnownIssue, shown_on
from properties.judge import Judge, PropertyFailure
from properties.known_issues import KNOWN_ISSUES
from properties.report import Report
from properties.repro import PROJECT
from properties.tally import Tally
from properties.trial import Trial
from tests.judging import (
    CASE,
    DIED,
    HANG,
    RAISED,
    WRONG,
    FakeWorlds,
    hand_on,
    judge_of,
    raising,
)
from tests.known_issue_cases import MAY_SHOW, SHOWN, Shown
from tests.world_cases import skip_without_device

Pools: TypeAlias = dict[tuple[str, str], WorldPool]

JUDGED = [shown for shown in SHOWN if shown.found_by != "retained-bytes-match"]
"""Those whose property has a verdict on the reference, whose wrapper's bytes are not predicted."""


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    pools: Pools = {
        (name, device): WorldPool(name, device=device)
        for name in ("torch_fsdp1", "torch_fsdp2", "accelerate", "reference")
        for device in ("cpu", "sim")
    }
    yield pools
    for pool in pools.values():
        pool.close()


def _pool(pools: Pools, engine: str, device: str) -> WorldPool:
    pool = pools[engine, device]
    skip_without_device(pool)
    return pool


def _judge(folder: Path, pool: WorldPool, engine: str) -> Judge:
    return Judge(
        trial=Trial(worlds=pool, engine=engine, known_issues=KNOWN_ISSUES), repro_folder=folder
    )


def _report(engine: str, tallies: dict[str, Tally]) -> dict[str, Any]:
    report = Report(
        engine=engine,
        device="cpu",
        versions={},
        profile="default",
        seed=0,
        max_world_size=4,
        tallies=tallies,
    )
    read: dict[str, Any] = json.loads(report.to_json())
    assert any(line.startswith("known issue ") for line in report.table())
    return {issue["id"]: issue for issue in read["known_issues"]}


def test_every_issue_is_shown_here() -> None:
    of_torch = {issue.id for issue in KNOWN_ISSUES if "verl" not in issue.engines}
    assert of_torch == {shown.id for shown in SHOWN}  # verl's: tests/test_verl.py
    assert len({issue.id for issue in KNOWN_ISSUES}) == len(KNOWN_ISSUES)
    for issue in KNOWN_ISSUES:
        finding = (PROJECT / issue.reference).is_file()
        assert issue.reference.startswith("https://") or finding
        assert all(load_check(name) for name in (*issue.properties, *issue.must_in))


@pytest.mark.parametrize(
    "shown", [*SHOWN, *MAY_SHOW], ids=lambda shown: f"{shown.id}-{shown.found_by}"
)
def test_an_issue_is_found_and_reported_as_known(
    pools: Pools, tmp_path: Path, shown: Shown
) -> None:
    judge = _judge(tmp_path, _pool(pools, shown.engine, shown.device), shown.engine)
    judge(load_check(shown.found_by), shown.case)
    (tally,) = judge.tallies.values()
    assert tally.known_issue == {shown.id: 1}
    assert (tally.verdict, tally.failed) == ("known_issue", 0)
    told = _report(shown.engine, judge.tallies)
    assert told[shown.id]["cases"] == 1
    assert told[shown.id]["found_by"] == {shown.found_by: 1}


@pytest.mark.parametrize("shown", JUDGED, ids=lambda shown: f"{shown.id}-{shown.found_by}")
def test_where_it_no_longer_shows_the_session_fails(
    pools: Pools, tmp_path: Path, shown: Shown
) -> None:
    """The reference engine is right in all of these: under the torch engine's name it is fixed."""
    judge = _judge(tmp_path, _pool(pools, "reference", shown.device), shown.engine)
    (issue,) = [issue for issue in KNOWN_ISSUES if issue.id == shown.id]
    assert issue.must(shown.case)
    if issue.must_in and shown.found_by not in issue.must_in:
        judge(load_check(shown.found_by), shown.case)
        assert [tally.verdict for tally in judge.tallies.values()] == ["pass"]
        return
    with pytest.raises(PropertyFailure, match=f"known issue {shown.id} no longer shows") as caught:
        judge(load_check(shown.found_by), shown.case)
    assert type(caught.value).__name__.endswith("Fixed")
    told = _report(shown.engine, judge.tallies)
    assert (told[shown.id]["fixed"], told[shown.id]["cases"]) == (1, 0)


def _hits(case: Case) -> bool:
    return case.model.family == "linear"


ISSUE = KnownIssue(
    id="T-1",
    engines=("fake",),
    reason="so it is",
    reference="https://example.org",
    hits=_hits,
    must=_hits,
    ends=("Hung", "Died", "RaisedZeroDivisionError"),
)


@pytest.mark.parametrize("error", [RAISED, DIED, HANG], ids=["raised", "died", "hung"])
def test_an_issue_may_end_otherwise_than_wrong(tmp_path: Path, error: Exception) -> None:
    judge = judge_of(tmp_path, raising(error), None, ISSUE)
    judge(hand_on, CASE)
    (tally,) = judge.tallies.values()
    assert (tally.verdict, tally.known_issue) == ("known_issue", {"T-1": 1})
    assert not list(tmp_path.iterdir())


def test_an_issue_of_the_host_is_none_on_a_device() -> None:
    ((issue, *_), other) = (
        [issue for issue in KNOWN_ISSUES if issue.devices == devices]
        for devices in (("cpu",), ("cpu", "sim", "cuda"))
    )
    assert issue in shown_on("cpu", KNOWN_ISSUES)
    assert issue not in shown_on("sim", KNOWN_ISSUES)
    assert set(other) <= set(shown_on("sim", KNOWN_ISSUES))


def test_another_ending_or_other_words_are_no_known_issue(tmp_path: Path) -> None:
    with pytest.raises(PropertyFailure, match="fail"):
        judge_of(tmp_path, lambda _: WRONG, None, ISSUE)(hand_on, CASE)
    worded = replace(ISSUE, says=("overflow",))
    with pytest.raises(PropertyFailure, match="boom"):
        judge_of(tmp_path, raising(RAISED), None, worded)(hand_on, CASE)
    worded = replace(ISSUE, says=("overflow", "boom"))
    judge_of(tmp_path, raising(RAISED), None, worded)(hand_on, CASE)


def test_a_known_hang_is_run_once(tmp_path: Path) -> None:
    judge = judge_of(tmp_path, raising(HANG), None, ISSUE)
    for seed in range(3):
        judge(hand_on, replace(CASE, seed=seed))
    (tally,) = judge.tallies.values()
    assert (tally.drawn, tally.judged, tally.known_issue) == (3, 1, {"T-1": 1})
    assert tally.not_applicable == {"not run: known issue T-1 has hung before": 2}
    assert cast(FakeWorlds, judge.trial.worlds).num_runs == 1


def test_a_pass_that_a_fresh_world_denies_is_a_flake(tmp_path: Path) -> None:
    judge = judge_of(tmp_path, lambda _: passing(), raising(DIED), ISSUE)
    with pytest.raises(PropertyFailure, match="state leak or flake"):
        judge(hand_on, CASE)
    (tally,) = judge.tallies.values()
    assert (tally.verdict, tally.fixed) == ("inconclusive", {})


def test_what_the_engine_refused_disproves_nothing(tmp_path: Path) -> None:
    """A check may leave out a part that the engine has not got; the rest passes."""
    only_part = replace(ISSUE, hits=lambda case: case.seed == 1, must=lambda case: case.seed == 1)

    def refuse_the_part(case: Case) -> Verdict:
        if only_part.must(case):
            raise UnsupportedCase("no odd seeds")
        return passing()

    def check(case: Case, run: Run) -> Verdict:
        verdict = hand_on(case, run)
        with contextlib.suppress(UnsupportedCase):
            run(replace(case, seed=1))
        return verdict

    judge = judge_of(tmp_path, refuse_the_part, None, only_part)
    judge(check, replace(CASE, seed=0))
    assert [tally.verdict for tally in judge.tallies.values()] == ["pass"]
    judge = judge_of(tmp_path, lambda _: passing(), None, only_part)
    with pytest.raises(PropertyFailure, match="no longer shows"):
        judge(check, replace(CASE, seed=0))

"""What the detection measures with: its searches, its shrinking, its draws and its numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NoReturn

import pytest

from fsdp_engine.contract.case import Case
from fsdp_engine.contract.model import Model
from fsdp_engine.contract.observation import Observation
from fsdp_engine.contract.protocol import EngineTables
from oracles.verdict import Mismatch, Verdict, exactly
from properties.covering import Axes
from properties.profiles import PROFILES
from properties.strategies.cases import cases
from properties.suite import over_rows
from tests.detection.__main__ import main
from tests.detection.clean import Judged, Lot, draw
from tests.detection.measure import Find, Measured
from tests.detection.search import Searching, SuiteTest, items_of
from tests.detection.shrinking import Minimal, phrase, shrink
from tests.detection.summary import summary
from tests.faults.fault import fault
from tests.small_cases import small_case

DEFAULT = PROFILES["default"]


class _NoRanks:
    """A run for checks that look at the case alone."""

    def __call__(self, case: Case) -> Observation:
        raise NotImplementedError

    def tables(
        self,
        *,
        mesh_shapes: tuple[tuple[int, int], ...] = (),
        strategies: tuple[tuple[int, bool], ...] = (),
    ) -> EngineTables:
        raise NotImplementedError


def _has_one_unit(case: Case, _run: object) -> Verdict:
    units = case.model.units
    return exactly([Mismatch(where="units", got=str(units), wanted="1")] if units > 1 else [])


def _suite_of_one_unit() -> SuiteTest:
    @over_rows(cases)
    def test(case: Case, judge: object) -> None:
        judge(_has_one_unit, case)  # type: ignore[operator]  # any stand-in for the judge

    return SuiteTest(
        property_id="one-unit",
        name="test",
        suite=test.pytestmark[0].args[0],  # type: ignore[attr-defined]  # set by `over_rows`
        run_item=test,
    )


def test_shrinking_ends_at_the_smallest_case(tmp_path: Path) -> None:
    row = Axes(mesh="line3", kind="mlp")
    test = _suite_of_one_unit()
    searching = Searching(profile=PROFILES["nightly"], seed=0, root=tmp_path)
    minimal = shrink(test, row, _NoRanks(), searching)
    assert minimal.case.model.units == 2
    assert phrase(minimal.case) == "fsdp2 on 3, 2 units, 1 micro-batch, fp32, mlp, train"
    assert minimal.num_cases > 1


def test_what_is_looked_at_first_changes_no_search() -> None:
    name = "gradient-matches-oracle"
    plain = items_of(name, DEFAULT)
    ordered = items_of(name, DEFAULT, first=lambda row: row.mesh == "single")
    assert sorted(plain, key=str) == sorted(ordered, key=str)
    singles = [isinstance(item, Axes) and item.mesh == "single" for _, item in ordered]
    assert any(singles)
    assert singles == sorted(singles, reverse=True)


def test_a_lot_is_the_same_every_time() -> None:
    lot = Lot(engine="torch_fsdp1", number=3, num_cases=4)
    drawn = draw(lot)
    assert drawn == draw(lot)
    assert drawn != draw(Lot(engine="torch_fsdp1", number=4, num_cases=4))
    assert {case.engine.strategy for case in drawn[1]} == {"fsdp1"}


def test_finished_lots_are_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    judged = Judged(
        engine="reference",
        number=0,
        num_cases=10,
        endings={"pass": 70, "fail": 1},
        known_issues={},
        accusations=("reference some-property case.json: wrong",),
        inconclusive=(),
    )
    assert Judged.from_line(judged.to_line()) == judged
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".reports").mkdir()
    path = tmp_path / ".reports" / "clean-reference.jsonl"
    path.write_text(judged.to_line() + "\n")
    monkeypatch.setattr("tests.detection.parallel.zygote", _never)
    assert main(["--clean", "reference", "--cases", "10"]) == 1
    assert "10 cases, verdicts: fail 1, pass 70" in capsys.readouterr().out


def _never() -> NoReturn:
    raise AssertionError("nothing is to be run")


def test_summary_and_report_are_plain_numbers() -> None:
    one = fault("loss", "loss:MeanOfMeans", "textbook", "some-property")
    finds = tuple(
        Find(property_id="some-property", seed=seed, num_cases=cases, seconds=0.5, found=True)
        for seed, cases in enumerate((1, 2, 9))
    )
    minimal = Minimal(case=small_case(shape=(2,), model=Model()), seconds=4.0, num_cases=30)
    missed = Find(property_id="some-property", seed=0, num_cases=176, seconds=9.0, found=False)
    measured = [
        Measured(fault=one, finds=finds, minimal=minimal),
        Measured(fault=one, finds=(missed,), minimal=None),
    ]
    numbers = summary(measured)
    assert (numbers["faults"], numbers["found"], numbers["missed"]) == (2, 1, ["MeanOfMeans"])
    assert numbers["cases_to_find"] == {"median": 2, "p90": 9, "max": 9}
    assert numbers["seconds_to_minimal"] == {"median": 4.0, "p90": 4.0, "max": 4.0}
    assert json.loads(json.dumps(measured[0].to_plain()))["minimal"]["cases"] == 30
    assert measured[1].line().startswith("NOT FOUND  MeanOfMeans  loss  some-property(-)")

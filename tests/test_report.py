"""The report: exactly the promised fields, counts that add up, also over several workers."""

from __future__ import annotations

import json
import math
from typing import Any

from fsdp_engine.contract.case import Case, Mesh
from fsdp_engine.contract.case_file import case_id
from oracles.verdict import Mismatch, failing, passing
from properties.covering import feasible_pairs
from properties.report import Report
from properties.strategies.tables import one_case
from properties.tally import Tally

(CASE,) = one_case()
WRONG = failing(Mismatch(where="w", got="1", wanted="0"), margin=math.inf, margin_kind="calibrated")

FIELDS = [
    "schema", "engine", "device", "versions", "profile", "seed", "wall_seconds",
    "cases_per_second", "pairs_feasible", "pairs_judged", "unreplayable",
    "lacks", "known_issues", "properties",
]  # fmt: skip
PROPERTY_FIELDS = [
    "id", "drawn", "judged", "not_applicable", "inconclusive", "known_issue", "fixed", "failed",
    "cases_per_world_size", "verdict", "worst_margin", "margin_kind", "seconds", "case_ids",
    "notes", "failures",
]  # fmt: skip


def _report() -> Report:
    return Report(
        engine="fake",
        device="cpu",
        versions={"torch": "2"},
        profile="smoke",
        seed=7,
        max_world_size=4,
    )


def _read(report: Report) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(report.to_json())
    return read


def _passed(*cases: Case, margin: float = 0.5) -> Tally:
    tally = Tally()
    for case in cases:
        tally.add_judged(case, passing(margin=margin, margin_kind="rigorous"), None)
    return tally


def test_an_empty_report_has_all_fields() -> None:
    read = _read(_report())
    assert list(read) == FIELDS
    assert (read["wall_seconds"], read["cases_per_second"], read["pairs_judged"]) == (0.0, 0.0, 0)
    assert read["pairs_feasible"] == len(feasible_pairs(max_world_size=4))


def test_tallies_of_workers_add_up() -> None:
    report = _report()
    other = Case(batches=CASE.batches, mesh=Mesh(shape=(2, 1)))
    failed = Tally()
    failed.add_judged(other, WRONG, None)
    failed.refuse("no biases", by_engine=True)
    failed.add_inconclusive()
    for tally in (_passed(CASE), failed):
        # As it comes from a worker process.
        report.add({"gradient": json.loads(json.dumps(tally.to_plain()))})
    report.saw_test(10.0, 12.0)
    report.saw_test(11.0, 14.0)
    read = _read(report)
    (entry,) = read["properties"]
    assert list(entry) == PROPERTY_FIELDS
    assert entry["drawn"] == 4
    assert entry["judged"] == 2 == sum(entry["cases_per_world_size"].values())
    assert entry["not_applicable"] == {"no biases": 1}
    assert (entry["inconclusive"], entry["failed"], entry["verdict"]) == (1, 1, "fail")
    assert entry["margin_kind"] == "calibrated"
    assert entry["worst_margin"] > 1e300  # JSON has no infinity
    assert entry["case_ids"] == sorted([case_id(CASE), case_id(other)])
    assert (read["wall_seconds"], read["cases_per_second"]) == (4.0, 0.5)
    # Two rows that differ on one of eight axes: 28 pairs, and 7 more.
    assert read["pairs_judged"] == 35


def test_what_the_probe_found_is_told() -> None:
    report = _report()
    assert report.probe_lines() == ["probe: replayed gradients are bit-equal on this machine"]
    report.unreplayable = {"float64": "w[0]: got 1.0, should be 2.0"}
    (line,) = report.probe_lines()
    assert "float64" in line
    assert "w[0]: got 1.0" in line
    assert line in report.table()
    assert _read(report)["unreplayable"] == report.unreplayable


def test_a_refused_case_covers_nothing() -> None:
    tally = Tally()
    tally.refuse("no", by_engine=True)
    report = _report()
    report.add({"p": tally.to_plain()})
    assert report.pairs()[0] == 0
    assert report.unsatisfiable() == ["property p: every case was refused: no"]
    assert _read(report)["properties"][0]["verdict"] == "not_applicable"


def test_verdicts_in_order_of_weight() -> None:
    tally = Tally()
    seen = [tally.verdict]
    tally.add_judged(CASE, passing(), None)
    seen.append(tally.verdict)
    tally.add_judged(CASE, WRONG, "T-1")
    seen.append(tally.verdict)
    tally.add_inconclusive()
    seen.append(tally.verdict)
    tally.add_judged(CASE, WRONG, None)
    seen.append(tally.verdict)
    assert seen == ["not_applicable", "pass", "known_issue", "inconclusive", "fail"]
    assert (tally.judged, tally.failed, tally.drawn) == (3, 1, 4)


def test_a_margin_that_is_no_number_is_the_worst() -> None:
    assert _passed(CASE, margin=math.nan).worst_margin == math.inf


def test_the_table_names_every_property() -> None:
    report = _report()
    report.add({"p": _passed(CASE).to_plain(), "q": _passed(CASE, margin=0.25).to_plain()})
    header, p, q, pairs = report.table()
    assert header.split() == [
        "property",
        "verdict",
        "judged",
        "worlds",
        "worst",
        "margin",
        "seconds",
    ]
    assert p.split()[:4] == ["p", "pass", "1", "2:1"]
    assert "0.25 (rigorous)" in q
    assert pairs == f"pairs 28/{len(feasible_pairs(max_world_size=4))}"

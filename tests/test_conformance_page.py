"""The page of all engines: every kind of cell, nothing unescaped, nothing loaded from elsewhere."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdp_engine.contract.case import Case, Mesh
from oracles.verdict import Mismatch, failing, passing
from properties.catalog import PROPERTIES, descriptions
from properties.conformance.__main__ import main, read_run
from properties.conformance.details import mesh_picture, timeline
from properties.conformance.markup import MARKS, TITLES, link
from properties.conformance.page import page
from properties.conformance.runs import KINDS, EngineRun, from_json, kind_of, to_json
from properties.issues.issue import KnownIssue
from properties.report import Report
from properties.strategies.tables import one_case
from properties.tally import Tally

(CASE,) = one_case()
COLUMN = Case(batches=CASE.batches, mesh=Mesh(shape=(2, 1)))
EVIL = '<script>alert("x")</script>'

ISSUE = KnownIssue(
    id="T-1",
    engines=("fake", EVIL),
    reason="so it is",
    reference="https://example.org/1",
    hits=lambda _: True,
    must=lambda _: False,
    ends=("Failed",),
)
FAILURE: dict[str, Any] = {
    "case_id": "0123456789abcdef",
    "mesh": [2, 2],
    "outcome": "fail",
    "message": f"p: fail\n  w[0]: got {EVIL}, should be 0\nreplay x.json --engine fake",
    "command": "replay x.json --engine fake",
    "case_file": "x.json",
    "script": "x.py",
    "script_text": f"print({EVIL!r})\n",
    "timeline": [
        [{"at": "build", "what": "all-gather, 4 float32", "operation": "all_gather"}],
        [{"at": "build", "what": "all-reduce, 4 float32", "operation": "all_reduce"}],
    ],
}


def _tally(**kinds: int) -> Tally:
    """Judged cases by how they ended; `refused` and `inconclusive` as well."""
    tally = Tally()
    for _ in range(kinds.get("passed", 0)):
        tally.add_judged(CASE, passing(margin=0.5, margin_kind="rigorous"), None)
    wrong = failing(Mismatch(where="w", got="1", wanted="0"), margin=float("inf"))
    for _ in range(kinds.get("failed", 0)):
        tally.add_judged(COLUMN, wrong, None)
        tally.failures.append(FAILURE)
    for _ in range(kinds.get("known", 0)):
        tally.add_judged(COLUMN, wrong, ISSUE.id)
    for _ in range(kinds.get("refused", 0)):
        tally.refuse(f"no {EVIL}", by_engine=True)
    for _ in range(kinds.get("inconclusive", 0)):
        tally.add_inconclusive()
    return tally


TALLIES = {
    "p-pass": _tally(passed=3),
    "p-known": _tally(passed=1, known=2),
    "p-none": _tally(refused=4),
    "p-open": _tally(passed=1, inconclusive=1),
    "p-fail": _tally(passed=1, failed=1),
}


def _run(engine: str = "fake") -> EngineRun:
    report = Report(
        engine=engine,
        device="cpu",
        versions={"torch": "2", "python": "3"},
        profile="smoke",
        seed=7,
        max_world_size=4,
        lacks=({"strategy": "fsdp1", "mesh": "grid"},),
        known_issues=(ISSUE,),
        tallies=TALLIES,
    )
    return EngineRun(engine=engine, report=json.loads(report.to_json()))


def _buttons(html: str) -> dict[str, str]:
    """What is said of each cell to what it shows."""
    cells = re.findall(r'<button type="button" class="cell.*?</button>', html)
    return {re.findall('aria-label="([^"]*)"', cell)[0]: cell for cell in cells}


def test_every_kind_of_cell_has_its_colour_sign_and_words() -> None:
    html = page([_run()], dict.fromkeys([*TALLIES, "p-nothing"], "what it promises"))
    said = {
        "fake, p-pass: pass, 3 cases judged": ("pass", "3", "0.5"),
        "fake, p-known: known issue, 3 cases judged": ("known_issue", "3", "2 known"),
        "fake, p-none: not applicable, 0 cases judged": ("not_applicable", "n/a", ""),
        "fake, p-open: inconclusive, 1 case judged": ("inconclusive", "1", "0.5"),
        "fake, p-fail: failed, 2 cases judged": ("fail", "2", "not finite"),
        "fake, p-nothing: not run, 0 cases judged": ("not_run", MARKS["not_run"], ""),
    }
    buttons = _buttons(html)
    assert set(buttons) == set(said)
    for label, (kind, *shown) in said.items():
        assert f'class="cell {kind}"' in buttons[label]
        assert all(piece in buttons[label] for piece in shown), label
    assert {kind for kind, *_ in said.values()} == set(KINDS) == set(MARKS) == set(TITLES)
    targets = re.findall('popovertarget="([^"]*)" aria-label', html)
    assert len(set(targets)) == len(said)
    assert all(f'id="{target}" role="dialog"' in html for target in targets)


def test_what_comes_from_a_session_is_escaped() -> None:
    run = replace(_run(EVIL), reason=EVIL)
    html = page([run], dict.fromkeys(TALLIES, EVIL))
    assert "<script" not in html
    assert html.count("&lt;script&gt;") > 5


def test_nothing_is_loaded_from_elsewhere() -> None:
    html = page([_run()], dict.fromkeys(TALLIES, ""))
    assert not re.search(r"\ssrc=|@import|url\(|<link|<script|<iframe", html)
    assert set(re.findall(r'href="([^"]*)"', html)) == {ISSUE.reference}


def test_a_failing_case_is_told_in_full() -> None:
    html = page([_run()], dict.fromkeys(TALLIES, ""))
    for piece in (FAILURE["command"], "x.py", "mesh 2 by 2", "rank 3", "ranks part here"):
        assert piece in html
    assert "4 cases: no &lt;script&gt;" in html  # reasons are counted
    assert "2 cases: so it is" in html
    assert "Drawn without strategy fsdp1: mesh grid" in html


def test_an_issue_of_several_engines_is_told_once() -> None:
    html = page([_run(), _run(EVIL)], dict.fromkeys(TALLIES, ""))
    section = html[html.index('id="issues"') :]
    assert section.count("so it is.") == 1
    assert section.count("2 cases (p-known 2)") == 2
    assert section.count(ISSUE.reference) == 1
    clean: dict[str, Any] = {"known_issues": [], "properties": []}
    report = _run().report
    assert report is not None
    none = page([EngineRun(engine="fake", report=report | clean)], {})
    assert "None of these engines has any." in none


def test_an_engine_that_was_not_run_is_listed_with_the_reason() -> None:
    gone = EngineRun(engine="gone", reason="there is no module gone", exit_code=4)
    html = page([_run(), gone], dict.fromkeys(TALLIES, ""))
    assert "Not run." in html
    assert "there is no module gone" in html
    assert not any(label.startswith("gone") for label in _buttons(html))
    assert "No engine was run." in page([gone], {})


def test_the_mesh_is_drawn_replicas_down_and_shards_across() -> None:
    rows = re.findall("<tr>.*?</tr>", mesh_picture((2, 3)))[1:]
    assert [re.findall(r"rank (\d)", row) for row in rows] == [list("012"), list("345")]
    assert "replica" not in mesh_picture((2,))


def test_ranks_that_agree_share_a_cell_of_the_timeline() -> None:
    same = {"at": "build", "what": "all-reduce", "operation": "all_reduce"}
    agreeing = timeline([[same], [same]])
    assert 'colspan="2"' in agreeing
    assert "part here" not in agreeing
    shorter = timeline([[same, same], [same]])
    assert shorter.count("ranks part here") == 1
    assert "nothing" in shorter
    assert "no collectives" in timeline([])


@pytest.mark.parametrize(
    ("reference", "target"),
    [
        ("https://example.org/1?a=1&b=2", "https://example.org/1?a=1&amp;b=2"),
        ("docs/findings/x_1.py", "../../docs/findings/x_1.py"),
        ("javascript:alert(1)", None),
        ("docs/../../etc/passwd", None),
    ],
)
def test_links_lead_to_public_pages_and_findings_alone(reference: str, target: str | None) -> None:
    found = re.findall('href="([^"]*)"', link(reference, "it"))
    assert found == ([] if target is None else [target])


def test_all_sessions_survive_the_file() -> None:
    runs = (_run(), EngineRun(engine="gone", reason="no", exit_code=4))
    assert from_json(to_json(runs)) == runs


def test_what_a_session_left_is_read(tmp_path: Path) -> None:
    report, log = tmp_path / "r.json", tmp_path / "r.log"
    log.write_text("ERROR: --engine x: there is no module x\n")
    report.touch()  # pytest has made it, and ended before it was written
    unknown = read_run("x", report, log, exit_code=4)
    assert (unknown.report, unknown.reason) == (None, "--engine x: there is no module x")
    log.write_text("first\nlast words\n")
    crashed = read_run("x", report, log, exit_code=3)
    assert "code 3: first last words" in crashed.reason
    written = _run()
    report.write_text(json.dumps(written.report))
    assert read_run("fake", report, log, exit_code=1) == replace(written, exit_code=1)
    ended = read_run("fake", report, log, exit_code=2)
    assert ended.report is not None
    assert "code 2" in ended.reason


def test_every_property_has_a_sentence() -> None:
    assert list(descriptions()) == list(PROPERTIES)
    assert all(descriptions().values())
    assert kind_of(None) == "not_run"


def test_an_engine_is_run_and_the_page_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole command, over one test of a real engine."""
    monkeypatch.chdir(tmp_path)
    few = ["-n", "0", "-k", "strategy_is_total", "-p", "no:cacheprovider"]
    code = main(["--profile", "smoke", "--engines", "torch_fsdp2", "--out", "page", "--", *few])
    assert code == 0
    (run,) = from_json(Path("page", "report.json").read_text())
    assert run.properties["strategy-is-total"]["verdict"] == "pass"
    html = Path("page", "report.html").read_text()
    assert "torch_fsdp2, strategy-is-total: pass, 1 case judged" in html

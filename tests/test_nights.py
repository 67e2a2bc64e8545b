"""What a session leaves for the page of margins, and failures that machines share."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest

from fsdp_engine.contract.case import Case
from oracles.verdict import Mismatch, failing, passing
from properties import nights, shared
from properties.covering import Axes
from properties.judge import Judge, PropertyFailure
from properties.profiles import PROFILES, has_failed
from properties.report import Report
from properties.repro import read_case_file
from properties.strategies.cases import cases
from properties.strategies.tables import one_case
from properties.suite import Search, over_rows
from properties.tally import Tally
from tests.judging import WRONG, hand_on, judge_of

(CASE,) = one_case()


def _report(margin: float, *, engine: str = "reference") -> Report:
    report = Report(
        engine=engine,
        device="cpu",
        versions={"torch": "2.13.0"},
        profile="nightly",
        seed=7,
        max_world_size=8,
    )
    tally = Tally()
    verdict = passing(margin=margin, margin_kind="rigorous")
    if margin > 1.0:
        wrong = Mismatch(where="here", got="1", wanted="2")
        verdict = failing(wrong, margin=margin, margin_kind="rigorous")
    tally.add_judged(CASE, verdict, None)
    report.add({"gradient-matches-oracle": tally.to_plain()})
    return report


class _Wellformed(HTMLParser):
    """Every element that is opened is closed, and nothing comes from elsewhere."""

    VOID: ClassVar = {"meta", "path", "polyline", "circle"}

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.circles: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002
        assert tag not in ("script", "link", "img")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in self.VOID
        if tag == "circle":
            self.circles.append(str(dict(attrs)["class"]))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_file_of_nights_becomes_a_page(tmp_path: Path) -> None:
    path = tmp_path / ".hypothesis" / "nights.jsonl"
    assert nights.read(path) == []
    for margin in (0.5, 0.998, float("inf"), 0.25):
        found = nights.add(path, nights.night(_report(margin)))
    found = nights.add(path, nights.night(_report(0.125, engine="<b>own</b>")))
    assert nights.read(path) == found
    assert len(path.read_text().splitlines()) == len(found) == 5
    assert path.stat().st_size < 5 * 1000
    page = nights.page(found)
    parser = _Wellformed()
    parser.feed(page)
    assert parser.open == []
    assert parser.circles == ["fail", "pass", "pass"]  # the one that failed, and the last ones
    assert "&lt;b&gt;own&lt;/b&gt; on cpu" in page
    assert "gradient-matches-oracle: 0.5, 0.998, not finite, 0.25" in page
    assert re.search(r"<td>0\.25</td><td>not finite</td>", page)
    assert "4 sessions from" in page


def test_a_broken_line_and_an_old_night_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "nights.jsonl"
    for margin in (0.1, 0.2, 0.3):
        nights.add(path, nights.night(_report(margin)))
    path.write_text(path.read_text() + '{"at": "cut off')
    monkeypatch.setattr(nights, "MAX_NIGHTS", 3)
    margins = [
        one["properties"]["gradient-matches-oracle"][2]
        for one in nights.add(path, nights.night(_report(0.4)))
    ]
    assert margins == [0.2, 0.3, 0.4]


class _Redis:
    """As much of a client as Hypothesis and we use; all clients see the same sets."""

    sets: ClassVar[dict[bytes, set[bytes]]] = {}

    def __init__(self) -> None:
        self._asked: list[Callable[[], Any]] = []

    @classmethod
    def from_url(cls, url: str) -> Self:
        assert url.startswith("redis://")
        return cls()

    def ping(self) -> None:
        """It answers."""

    def scan_iter(self, match: str) -> Iterator[bytes]:
        return iter([key for key in self.sets if fnmatchcase(key.decode("latin-1"), match)])

    def pipeline(self) -> _Redis:
        return _Redis()

    def smembers(self, key: bytes) -> None:
        self._asked.append(lambda: set(self.sets.get(key, ())))

    def sadd(self, key: bytes, value: bytes) -> None:
        def add() -> int:
            self.sets.setdefault(key, set()).add(value)
            return 1

        self._asked.append(add)

    def srem(self, key: bytes, value: bytes) -> None:
        def remove() -> int:
            self.sets.get(key, set()).discard(value)
            return 1

        self._asked.append(remove)

    def expire(self, key: bytes, after: object) -> None:  # noqa: ARG002
        self._asked.append(lambda: 1)

    def publish(self, channel: str, message: str) -> None:
        """Nobody listens."""

    def execute(self) -> list[Any]:
        return [ask() for ask in self._asked]


@pytest.fixture
def redis(monkeypatch: pytest.MonkeyPatch) -> str:
    module: Any = types.ModuleType("redis")
    module.Redis, module.RedisError = _Redis, ConnectionError
    monkeypatch.setitem(sys.modules, "redis", module)
    monkeypatch.delitem(sys.modules, "hypothesis.extra.redis", raising=False)
    monkeypatch.setattr(_Redis, "sets", {})
    shared.connect.cache_clear()
    return "redis://somewhere:6379/0"


@over_rows(cases)
def suite(case: Case, judge: Judge) -> None:
    judge(hand_on, case)


def test_another_machine_begins_with_what_one_has_found(tmp_path: Path, redis: str) -> None:
    seen: list[Case] = []

    def behave(case: Case) -> Any:
        seen.append(case)
        return WRONG if case.model.units > 1 else passing()

    def search(machine: str, seed: int) -> Search:
        return Search(
            profile=PROFILES["nightly"],
            seed=seed,
            key="a test",
            root=tmp_path / machine,
            database=redis,
        )

    row = Axes(kind="mlp")
    with pytest.raises(PropertyFailure):
        suite(row, judge_of(tmp_path / "repro", behave), search("one", 3))
    (path,) = (tmp_path / "repro").glob("*.json")
    smallest = read_case_file(path.read_text()).case
    assert has_failed(tmp_path, "a test", url=redis)
    assert not has_failed(tmp_path, "another test", url=redis)
    assert not has_failed(tmp_path / "one", "a test")
    seen.clear()
    with pytest.raises(PropertyFailure):
        suite(row, judge_of(tmp_path / "repro", behave), search("other", 4))
    assert seen[0] == smallest


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("http://somewhere", "not an address of a Redis; legal are redis://"),
        ("redis://somewhere", "needs the package redis: pip install redis"),
    ],
)
def test_what_is_no_shared_database_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], url: str, told: str
) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    shared.connect.cache_clear()
    suite = ["properties/test_planner.py", "--database", url, "-n", "0", "-p", "no:cacheprovider"]
    assert pytest.main(suite) == pytest.ExitCode.USAGE_ERROR
    printed = capsys.readouterr()
    assert f"--database {url}: {told}" in printed.out + printed.err


def test_a_page_needs_a_report_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    suite = ["properties/test_planner.py", "--nights", "n.jsonl", "-n", "0"]
    assert pytest.main([*suite, "-p", "no:cacheprovider"]) == pytest.ExitCode.USAGE_ERROR
    printed = capsys.readouterr()
    assert "its page lies beside the report: --report-json" in printed.out + printed.err

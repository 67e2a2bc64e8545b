"""The line that says how far a long run is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from oracles.verdict import passing
from properties.progress import Progress, is_wanted
from properties.report import Report
from properties.tally import Tally
from tests.judging import CASE


class _Terminal:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def rewrite(self, line: str, *, erase: bool) -> None:
        assert erase
        self.lines.append(line)

    def write_line(self, line: str) -> None:
        self.lines.append(line)


def _report() -> Report:
    return Report(
        engine="fake", device="cpu", versions={}, profile="smoke", seed=0, max_world_size=4
    )


def _finished(**values: Any) -> Any:
    return SimpleNamespace(when="teardown", fsdp_properties={"replicas-agree": {}}, **values)


def test_it_says_property_cases_speed_and_margin() -> None:
    report, terminal = _report(), _Terminal()
    progress: Any = Progress(report, terminal)  # type: ignore[arg-type]  # all that it writes to
    assert progress.line("replicas-agree", 2.0) == "replicas-agree: 0 cases, 0.0/s, margin -"
    tally = Tally()
    tally.add_judged(CASE, passing(margin=0.25), None)
    tally.add_inconclusive()
    report.tallies["replicas-agree"] = tally
    told = "replicas-agree: 1 cases, 0.5/s, margin 0.25, 1 failed"
    assert progress.line("replicas-agree", 2.0) == told
    progress.pytest_runtest_logreport(_finished())
    progress.pytest_runtest_logreport(_finished())  # too soon to be read
    progress.pytest_sessionfinish()
    first, end = terminal.lines
    assert first.startswith("replicas-agree: 1 cases, ")
    assert end == ""


@pytest.mark.parametrize(
    ("isatty", "ci", "verbosity", "wanted"),
    [
        (True, False, 0, True),
        (True, True, 0, False),
        (False, False, 0, False),
        (True, False, 1, False),
    ],
)
def test_only_a_terminal_outside_ci_gets_it(
    monkeypatch: pytest.MonkeyPatch, *, isatty: bool, ci: bool, verbosity: int, wanted: bool
) -> None:
    monkeypatch.delenv("CI", raising=False)
    if ci:
        monkeypatch.setenv("CI", "true")
    config: Any = SimpleNamespace(
        pluginmanager=SimpleNamespace(get_plugin=lambda _: SimpleNamespace(isatty=isatty)),
        get_verbosity=lambda: verbosity,
        option=SimpleNamespace(collectonly=False),
    )
    assert is_wanted(config) == wanted

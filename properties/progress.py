"""One line that says how far a long run is, on a terminal and nowhere else."""

from __future__ import annotations

import os
import time

import pytest

from properties.report import Report

EVERY_S = 0.5


def is_wanted(config: pytest.Config) -> bool:
    """Whether somebody watches: a terminal, outside continuous integration, as quiet as usual."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    watched = terminal is not None and terminal.isatty and "CI" not in os.environ
    return bool(watched) and config.get_verbosity() == 0 and not config.option.collectonly


class Progress:
    """A pytest plugin that writes its line over itself; failures are still shown as they come."""

    def __init__(self, report: Report, terminal: pytest.TerminalReporter) -> None:
        self._report = report
        self._terminal = terminal
        self._began = time.monotonic()
        self._shown = 0.0

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """No dots: the line counts what passes."""
        if report.when == "call" and report.passed:
            return "passed", "", ""
        return ("skipped", "", "") if report.skipped else None

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write the line anew, not more often than it can be read."""
        now = time.monotonic()
        tallies: dict[str, object] = getattr(report, "fsdp_properties", {})
        if report.when != "teardown" or not tallies or now - self._shown < EVERY_S:
            return
        self._shown = now
        self._terminal.rewrite(self.line(next(iter(tallies)), now - self._began), erase=True)

    def line(self, name: str, seconds: float) -> str:
        """Property, cases done, cases per second, the worst margin of all."""
        tallies = self._report.tallies.values()
        judged = sum(tally.judged for tally in tallies)
        margins = [tally.worst_margin for tally in tallies if tally.worst_margin is not None]
        margin = f"{max(margins):.4g}" if margins else "-"
        failed = sum(tally.failed + tally.inconclusive for tally in tallies)
        told = f"{name}: {judged} cases, {judged / max(seconds, 1e-3):.1f}/s, margin {margin}"
        return told + (f", {failed} failed" if failed else "")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        """What follows begins on a line of its own."""
        if self._shown:
            self._terminal.write_line("")

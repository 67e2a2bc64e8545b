"""The one place where a verdict becomes a test's failure.

`judge(check, case)` runs the check in the warm worlds, repeats everything but a pass in a fresh
one, writes what is needed to repeat it, and raises the property's own exception. Nothing here knows
what a check looks at.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import hypothesis

from fsdp_engine.contract.case import Case
from fsdp_engine.contract.case_file import case_id
from fsdp_engine.contract.errors import UnsupportedCase
from fsdp_engine.contract.protocol import Run
from oracles.verdict import Verdict, not_applicable
from properties.catalog import Check, property_id
from properties.known_issues import KnownIssue, known_issue
from properties.outcome import Ending, ending_of, inconclusive
from properties.report import Tally
from properties.repro import remove_repro, repro_path, source_of, write_repro

MAX_MISMATCHES = 5
MAX_HANGS = 3
"""Cases that may hang in one test: each costs two deadlines. The search ends after them."""

MAX_HANGS_OF_ALL = 12
"""Cases that may hang in one process; after them nothing is run any more."""


class Worlds(Run, Protocol):
    """Warm worlds; `fresh` runs every case in a new one."""

    @property
    def fresh(self) -> Run: ...


class PropertyFailure(AssertionError):
    """A property does not hold, or could not be judged, for a case."""


@functools.cache
def failure_class(name: str, how: str) -> type[PropertyFailure]:
    """The exception of one property and one way to fail.

    Hypothesis tells bugs apart by the exception's type and line: with one class for all, shrinking
    would slip from a wrong gradient to a crash.
    """
    words = "".join(part.capitalize() for part in name.replace(":", "-").split("-"))
    return type(f"{words}{how}", (PropertyFailure,), {"__module__": __name__})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    kind: type[PropertyFailure]
    message: str


@dataclass(slots=True)
class Hangs:
    """How many cases have hung so far."""

    count: int = 0


@dataclass(slots=True, kw_only=True, repr=False)
class Judge:
    """Judges the cases of one test.

    `tallies` counts by property, `hangs` over all tests. A case that did not pass keeps its
    message, so that the search sees the same end when it comes back to it.
    """

    worlds: Worlds
    engine: str
    repro_folder: Path
    known_issues: tuple[KnownIssue, ...]
    hangs: Hangs
    tallies: dict[str, Tally] = field(default_factory=dict)
    _failures: dict[tuple[str, str], _Failure] = field(default_factory=dict)
    _kept: dict[str, Path] = field(default_factory=dict)
    _hangs: int = 0

    def __repr__(self) -> str:
        return f"Judge(engine={self.engine!r})"

    def __call__(self, check: Check, case: Case) -> None:
        """Judge one case.

        Raises:
            PropertyFailure: of the property's own class, with everything there is to say.
        """
        __tracebackhide__ = True
        name = property_id(check)
        key = (name, case_id(case))
        failure = self._failures.get(key)
        if failure is None:
            if self._hangs >= MAX_HANGS and hypothesis.currently_in_test_context():
                hypothesis.reject()
            failure = self._judged(check, case, name)
        if failure is not None:
            self._failures[key] = failure
            self._keep_only(name, case)
            # One line for all: the search tells failures apart by the line too.
            raise failure.kind(failure.message)

    def _judged(self, check: Check, case: Case, name: str) -> _Failure | None:
        tally = self.tallies.setdefault(name, Tally())
        began = time.monotonic()
        try:
            ending = self._confirmed(check, case)
        except UnsupportedCase as error:
            tally.refuse(str(error), by_engine=True)
            return None
        except Exception:
            tally.add_inconclusive()  # the check itself is broken; what it raised is shown
            raise
        finally:
            tally.seconds += time.monotonic() - began
        return self._counted(ending, case, name, tally)

    def _counted(self, ending: Ending, case: Case, name: str, tally: Tally) -> _Failure | None:
        verdict = ending.verdict
        match verdict.outcome:
            case "not_applicable":
                tally.refuse(verdict.reason, by_engine=False)
                return None
            case "inconclusive":
                tally.add_inconclusive()
                self._hangs += ending.how == "Hung"
                self.hangs.count += ending.how == "Hung"
            case "fail":
                issue = known_issue(
                    self.known_issues, engine=self.engine, property_id=name, case=case
                )
                tally.add_judged(case, verdict, issue)
                if issue is not None:
                    return None
            case "pass":
                tally.add_judged(case, verdict, None)
                _climb(verdict.margin, name)
                return None
        path = repro_path(self.repro_folder, case, name)
        message = failure_message(case, verdict, name=name, engine=self.engine, path=path)
        return _Failure(kind=failure_class(name, ending.how), message=message)

    def _keep_only(self, name: str, case: Case) -> None:
        """Write the files of the failure at hand; those of a search's larger cases go.

        A search ends by judging its smallest case once more, so its files are the ones that stay.
        """
        path = write_repro(self.repro_folder, case, property_id=name, engine=self.engine)
        before = self._kept.get(name, path)
        if before != path:
            remove_repro(before)
        self._kept[name] = path

    def _confirmed(self, check: Check, case: Case) -> Ending:
        """How the case ends in a warm world; anything but a pass is repeated in a fresh one."""
        if self.hangs.count >= MAX_HANGS_OF_ALL:
            reason = f"not run: {self.hangs.count} cases have hung before"
            return Ending(verdict=inconclusive(reason), how="NotRun")
        warm = ending_of(check, case, self.worlds)
        if warm.verdict.outcome in ("pass", "not_applicable"):
            return warm
        try:
            fresh = ending_of(check, case, self.worlds.fresh)
        except UnsupportedCase as error:
            fresh = Ending(verdict=not_applicable(str(error)), how="Refused")
        if fresh.verdict.outcome == warm.verdict.outcome:
            return fresh
        reason = (
            "state leak or flake: the same case in a fresh world is "
            f"{_told(fresh.verdict)}; before it was {_told(warm.verdict)}"
        )
        return Ending(verdict=inconclusive(reason), how="Flaked")


def failure_message(case: Case, verdict: Verdict, *, name: str, engine: str, path: Path) -> str:
    """The verdict, the worst of what is wrong, the case as source, its file, the command last."""
    shown = verdict.mismatches[:MAX_MISMATCHES]
    more = len(verdict.mismatches) - len(shown)
    lines = [f"{name}: {verdict.outcome} (engine {engine}, mesh {case.mesh.shape})"]
    lines += [verdict.reason] if verdict.reason else []
    lines += [f"  {mismatch}" for mismatch in shown]
    lines += [f"  ... and {more} more"] if more else []
    if verdict.margin is not None:
        lines.append(f"margin: {verdict.margin:.4g} ({verdict.margin_kind}; at most 1 passes)")
    lines += [
        f"@example(case={source_of(case)})",
        f"case file: {path}",
        f"python -m properties.replay {path} --engine {engine}",
    ]
    return "\n".join(lines)


def _told(verdict: Verdict) -> str:
    what = verdict.reason or "; ".join(map(str, verdict.mismatches[:MAX_MISMATCHES]))
    return f"{verdict.outcome} ({what})" if what else verdict.outcome


def _climb(margin: float | None, name: str) -> None:
    """Let the search look for larger margins, where there is a search."""
    if margin is not None and hypothesis.currently_in_test_context():
        hypothesis.target(margin, label=name)

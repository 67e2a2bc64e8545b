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

import hypothesis

from fsdp_engine.contract.case import Case
from fsdp_engine.contract.case_file import case_id
from fsdp_engine.contract.errors import NotOffered, UnsupportedCase
from fsdp_engine.contract.observation import Observation
from fsdp_engine.contract.protocol import Run
from oracles.verdict import not_applicable
from properties import trusted
from properties.budget import Budget, OutOfTime
from properties.catalog import Check, property_id
from properties.covering import axes_of
from properties.failure import described
from properties.issues.issue import KnownIssue, fixed_issue, known_issue
from properties.message import failure_message, gone, told
from properties.narrowing import is_lacking
from properties.outcome import Ending, Watched, Worlds, ending_of, inconclusive
from properties.repro import remove_repro, repro_path, write_repro
from properties.tally import Tally
from properties.trusted import Rations

MAX_HANGS = 3
"""Cases that may hang in one test: each costs two deadlines. The search ends after them."""

MAX_HANGS_OF_ALL = 12
"""Cases that may hang in one process; after them nothing is run any more."""


MAX_REDRAWN = 10
"""Refused cases of one test that another is drawn for: engines differ in what they have."""


MAX_SHRINK_S = 20.0
"""How long after its first failure a search goes on; what is left is simplified behind it."""


SETTLE_S = 60.0
"""What simplifying and running a script may take: with less time left it is not begun."""


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
    """`ending` is what a script is to show: None for what is no ending of the case's own."""

    kind: type[PropertyFailure]
    message: str
    outcome: str
    shown: Observation | None
    how: str
    ending: Ending | None


@dataclass(slots=True)
class Hangs:
    """How many cases have hung so far, and which known issues have."""

    count: int = 0
    known: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judged:
    """How a case ended; `issue` explains a failure, `fixed` is one that a pass disproves.

    `shown` is what the case itself showed.
    """

    ending: Ending
    shown: Observation | None = None
    issue: KnownIssue | None = None
    fixed: KnownIssue | None = None


@dataclass(slots=True, kw_only=True, repr=False)
class Judge:
    """Judges the cases of one test.

    `tallies` counts by property, `hangs` over all tests; `lacks` is where the engine says that no
    case applies to it. A case that did not pass keeps its message, so that the search sees the same
    end when it comes back to it.
    """

    worlds: Worlds
    engine: str
    repro_folder: Path
    known_issues: tuple[KnownIssue, ...]
    hangs: Hangs
    device: str = "cpu"
    lacks: tuple[dict[str, str], ...] = ()
    rations: Rations | None = None
    budget: Budget | None = None
    tallies: dict[str, Tally] = field(default_factory=dict)
    _failures: dict[tuple[str, str], _Failure] = field(default_factory=dict)
    _kept: dict[str, Path] = field(default_factory=dict)
    _last: tuple[Check, Case] | None = None
    _redrawn: set[tuple[str, str]] = field(default_factory=set)
    _hangs: int = 0
    _failed_at: float = 0.0

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
            if hypothesis.currently_in_test_context():
                self._end_in_time()
            failure = self._judged(check, case, name)
        if failure is not None:
            self._failed_at = self._failed_at if self._failures else time.monotonic()
            self._failures[key] = failure
            path = self._keep_only(name, case)
            told = described(
                case, path, outcome=failure.outcome, message=failure.message, shown=failure.shown
            )
            self.tallies[name].failures = [told]
            self._last = (check, case)
            # One line for all: the search tells failures apart by the line too.
            raise failure.kind(failure.message)

    def _end_in_time(self) -> None:
        """End a search whose time, or whose ration of hangs, is over."""
        over = self.budget is not None and self.budget.is_over
        if over and not self._failures:
            raise OutOfTime
        late = over or time.monotonic() - self._failed_at > MAX_SHRINK_S
        if self._hangs >= MAX_HANGS or (self._failures and late):
            hypothesis.reject()

    def settled(self, error: PropertyFailure) -> PropertyFailure:
        """The failure a search ended with, of its simplest case and with a script that was run.

        The same one where `rations` have none left for it: the first of a kind has all.
        """
        assert self._last is not None
        check, case = self._last
        name = property_id(check)
        failed = self._failures[name, case_id(case)]
        late = self.budget is not None and self.budget.seconds_left < SETTLE_S
        if self.rations is None or failed.ending is None or late:
            return error
        if not self.rations.take(name, failed.how):
            return error
        failure = trusted.Failure(
            case=case,
            name=name,
            ending=failed.ending,
            engine=self.engine,
            device=self.device,
            folder=self.repro_folder,
        )

        def look(candidate: Case) -> Ending | None:
            try:
                judged = self._run(check, candidate, name, self.worlds)
            except Exception:  # noqa: BLE001  a check may not be made for such a case
                return None
            return None if judged.issue or judged.fixed else judged.ending

        shown = trusted.trusted(failure, look, self.worlds)
        if self._kept[name] != shown.path:
            remove_repro(self._kept[name])
        message = failure_message(
            shown.case,
            shown.verdict,
            name=name,
            engine=self.engine,
            device=self.device,
            path=shown.path,
            script=shown.script,
        )
        same = failed.shown if shown.case == case else None
        told = described(
            shown.case, shown.path, outcome=failed.outcome, message=message, shown=same
        )
        self.tallies[name].failures = [told]
        return type(error)(message)

    def _judged(self, check: Check, case: Case, name: str) -> _Failure | None:
        tally = self.tallies.setdefault(name, Tally())
        began = time.monotonic()
        try:
            judged = self._confirmed(check, case, name)
        except UnsupportedCase as error:
            tally.refuse(str(error), by_engine=not isinstance(error, NotOffered))
            self._redraw(case, name)
            return None
        except Exception:
            tally.add_inconclusive()  # the check itself is broken; what it raised is shown
            raise
        finally:
            tally.seconds += time.monotonic() - began
        return self._counted(judged, case, name, tally)

    def _counted(self, judged: _Judged, case: Case, name: str, tally: Tally) -> _Failure | None:
        verdict, how = judged.ending.verdict, judged.ending.how
        if judged.issue is not None:
            tally.add_judged(case, verdict, judged.issue.id)
            return None
        match verdict.outcome:
            case "not_applicable":
                tally.refuse(verdict.reason, by_engine=False)
                self._redraw(case, name)
                return None
            case "inconclusive":
                tally.add_inconclusive()
                self._hangs += how == "Hung"
                self.hangs.count += how == "Hung"
            case "fail":
                tally.add_judged(case, verdict, None)
            case "pass" if judged.fixed is not None:
                verdict, how = gone(judged.fixed), "Fixed"
                tally.add_judged(case, verdict, None)
                tally.fixed[judged.fixed.id] += 1
            case "pass":
                tally.add_judged(case, verdict, None)
                _climb(verdict.margin, name)
                return None
        path = repro_path(self.repro_folder, case, name)
        message = failure_message(
            case, verdict, name=name, engine=self.engine, device=self.device, path=path
        )
        own = how in {"Failed", "Died", "Hung"} or how.startswith("Raised")
        return _Failure(
            kind=failure_class(name, how),
            message=message,
            outcome=verdict.outcome,
            shown=judged.shown,
            how=how,
            ending=judged.ending if own else None,
        )

    def _redraw(self, case: Case, name: str) -> None:
        """Have the search, where there is one, draw another case for one that judged nothing."""
        key = (name, case_id(case))
        if len(self._redrawn) < MAX_REDRAWN:
            self._redrawn.add(key)
        if key in self._redrawn and hypothesis.currently_in_test_context():
            hypothesis.reject()

    def _keep_only(self, name: str, case: Case) -> Path:
        """Write the files of the failure at hand; those of a search's larger cases go.

        A search ends by judging its smallest case once more, so its files are the ones that stay.
        """
        path = write_repro(
            self.repro_folder, case, property_id=name, engine=self.engine, device=self.device
        )
        before = self._kept.get(name, path)
        if before != path:
            remove_repro(before)
        self._kept[name] = path
        return path

    def _confirmed(self, check: Check, case: Case, name: str) -> _Judged:
        """How the case ends in a warm world; anything but a pass is repeated in a fresh one.

        A known issue needs no confirmation, and its end does.
        """
        if self.hangs.count >= MAX_HANGS_OF_ALL:
            reason = f"not run: {self.hangs.count} cases have hung before"
            return _Judged(ending=Ending(verdict=inconclusive(reason), how="NotRun"))
        hung = self._known_to_hang(name, case)
        if hung is not None:
            reason = f"not run: known issue {hung.id} has hung before"
            return _Judged(ending=Ending(verdict=not_applicable(reason), how="NotRun"))
        warm = self._run(check, case, name, self.worlds)
        if warm.issue is not None or warm.ending.verdict.outcome == "not_applicable":
            return warm
        if warm.ending.verdict.outcome == "pass" and warm.fixed is None:
            return warm
        try:
            fresh = self._run(check, case, name, self.worlds.fresh)
        except UnsupportedCase as error:
            refusal = Ending(verdict=not_applicable(str(error)), how="Refused")
            fresh = _Judged(ending=refusal)
        if fresh.ending.verdict.outcome == warm.ending.verdict.outcome:
            return fresh
        reason = (
            "state leak or flake: the same case in a fresh world is "
            f"{told(fresh.ending.verdict)}; before it was {told(warm.ending.verdict)}"
        )
        return _Judged(ending=Ending(verdict=inconclusive(reason), how="Flaked"))

    def _run(self, check: Check, case: Case, name: str, run: Run) -> _Judged:
        """The case's end in a world, held against the known issues."""
        watched = Watched(run)
        try:
            ending = ending_of(check, case, watched)
        except UnsupportedCase as error:
            row = axes_of(watched.cases[-1])
            if row is not None and is_lacking(row, self.lacks):
                raise NotOffered(str(error)) from error
            raise
        issues, ran = self.known_issues, watched.cases or [case]
        match ending.verdict.outcome:
            case "pass":
                fixed = fixed_issue(issues, engine=self.engine, property_id=name, ran=ran)
                return _Judged(ending=ending, shown=watched.shown, fixed=fixed)
            case "fail" | "inconclusive":
                issue = known_issue(
                    issues, engine=self.engine, property_id=name, ran=ran, ending=ending
                )
                if issue is not None and ending.how == "Hung":
                    self.hangs.known.add(issue.id)
                return _Judged(ending=ending, shown=watched.shown, issue=issue)
        return _Judged(ending=ending)

    def _known_to_hang(self, name: str, case: Case) -> KnownIssue | None:
        """The issue that has hung in this process and may again in this case."""
        for issue in self.known_issues:
            hung = issue.id in self.hangs.known and issue.concerns(self.engine, name)
            if hung and issue.hits(case):
                return issue
        return None


def _climb(margin: float | None, name: str) -> None:
    """Let the search look for larger margins, where there is a search."""
    if margin is not None and hypothesis.currently_in_test_context():
        hypothesis.target(margin, label=name)

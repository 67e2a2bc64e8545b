"""The one place where a verdict becomes a test's failure.

`judge(check, case)` has the case tried (`properties/trial.py`), writes what is needed to repeat a
failure, and raises the property's own exception. Nothing here knows what a check looks at.
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
from properties import trusted
from properties.budget import Budget, OutOfTime
from properties.catalog import Check, property_id
from properties.failure import described
from properties.message import failure_message, gone
from properties.outcome import Ending
from properties.repro import remove_repro, repro_path, write_repro
from properties.tally import Tally
from properties.trial import Trial, Tried
from properties.trusted import Rations

MAX_HANGS = 3
"""Cases that may hang in one test: each costs two deadlines. The search ends after them."""

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


@dataclass(slots=True, kw_only=True, repr=False)
class Judge:
    """Judges the cases of one test.

    `tallies` counts by property. A case that did not pass keeps its message, so that the search
    sees the same end when it comes back to it.
    """

    trial: Trial
    repro_folder: Path
    device: str = "cpu"
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
        return f"Judge(engine={self.trial.engine!r})"

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
            engine=self.trial.engine,
            device=self.device,
            folder=self.repro_folder,
        )

        def look(candidate: Case) -> Ending | None:
            try:
                judged = self.trial.once(check, candidate, name, self.trial.worlds)
            except Exception:  # noqa: BLE001  a check may not be made for such a case
                return None
            return None if judged.issue or judged.fixed else judged.ending

        shown = trusted.trusted(failure, look, self.trial.worlds)
        if self._kept[name] != shown.path:
            remove_repro(self._kept[name])
        message = failure_message(
            shown.case,
            shown.verdict,
            name=name,
            engine=self.trial.engine,
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
            judged = self.trial.confirmed(check, case, name)
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

    def _counted(self, judged: Tried, case: Case, name: str, tally: Tally) -> _Failure | None:
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
                self.trial.hangs.count += how == "Hung"
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
            case, verdict, name=name, engine=self.trial.engine, device=self.device, path=path
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
            self.repro_folder, case, property_id=name, engine=self.trial.engine, device=self.device
        )
        before = self._kept.get(name, path)
        if before != path:
            remove_repro(before)
        self._kept[name] = path
        return path


def _climb(margin: float | None, name: str) -> None:
    """Let the search look for larger margins, where there is a search."""
    if margin is not None and hypothesis.currently_in_test_context():
        hypothesis.target(margin, label=name)

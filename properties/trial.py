"""One case's trial: in a warm world, again in a fresh one, and held against the known issues."""

from __future__ import annotations

from dataclasses import dataclass, field

from fsdp_engine.contract.case import Case
from fsdp_engine.contract.errors import NotOffered, UnsupportedCase
from fsdp_engine.contract.observation import Observation
from fsdp_engine.contract.protocol import Run
from oracles.verdict import not_applicable
from properties.catalog import Check
from properties.covering import axes_of
from properties.issues.issue import KnownIssue, fixed_issue, known_issue
from properties.message import told
from properties.narrowing import is_lacking
from properties.outcome import Ending, Watched, Worlds, ending_of, inconclusive

MAX_HANGS_OF_ALL = 12
"""Cases that may hang in one process; after them nothing is run any more."""


@dataclass(slots=True)
class Hangs:
    """How many cases have hung so far, and which known issues have."""

    count: int = 0
    known: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """How a case ended; `issue` explains a failure, `fixed` is one that a pass disproves.

    `shown` is what the case itself showed.
    """

    ending: Ending
    shown: Observation | None = None
    issue: KnownIssue | None = None
    fixed: KnownIssue | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """How cases of one engine are tried.

    `hangs` counts over all tests of a process; `lacks` is where the engine says that no case
    applies to it.
    """

    worlds: Worlds
    engine: str
    known_issues: tuple[KnownIssue, ...]
    hangs: Hangs = field(default_factory=Hangs)
    lacks: tuple[dict[str, str], ...] = ()

    def confirmed(self, check: Check, case: Case, name: str) -> Tried:
        """How the case ends in a warm world; anything but a pass is repeated in a fresh one.

        A known issue needs no confirmation, and its end does.
        """
        if self.hangs.count >= MAX_HANGS_OF_ALL:
            reason = f"not run: {self.hangs.count} cases have hung before"
            return Tried(ending=Ending(verdict=inconclusive(reason), how="NotRun"))
        hung = self._known_to_hang(name, case)
        if hung is not None:
            reason = f"not run: known issue {hung.id} has hung before"
            return Tried(ending=Ending(verdict=not_applicable(reason), how="NotRun"))
        warm = self.once(check, case, name, self.worlds)
        if warm.issue is not None or warm.ending.verdict.outcome == "not_applicable":
            return warm
        if warm.ending.verdict.outcome == "pass" and warm.fixed is None:
            return warm
        try:
            fresh = self.once(check, case, name, self.worlds.fresh)
        except UnsupportedCase as error:
            refusal = Ending(verdict=not_applicable(str(error)), how="Refused")
            fresh = Tried(ending=refusal)
        if fresh.ending.verdict.outcome == warm.ending.verdict.outcome:
            return fresh
        reason = (
            "state leak or flake: the same case in a fresh world is "
            f"{told(fresh.ending.verdict)}; before it was {told(warm.ending.verdict)}"
        )
        return Tried(ending=Ending(verdict=inconclusive(reason), how="Flaked"))

    def once(self, check: Check, case: Case, name: str, run: Run) -> Tried:
        """The case's end in a world, held against the known issues."""
        watched = Watched(run)
        try:
            ending = ending_of(check, case, watched)
        except UnsupportedCase as error:
            row = axes_of(watched.refused or case)
            if row is not None and is_lacking(row, self.lacks):
                raise NotOffered(str(error)) from error
            raise
        issues, ran = self.known_issues, watched.cases or [case]
        match ending.verdict.outcome:
            case "pass":
                fixed = fixed_issue(issues, engine=self.engine, property_id=name, ran=ran)
                return Tried(ending=ending, shown=watched.shown, fixed=fixed)
            case "fail" | "inconclusive":
                issue = known_issue(
                    issues, engine=self.engine, property_id=name, ran=ran, ending=ending
                )
                if issue is not None and ending.how == "Hung":
                    self.hangs.known.add(issue.id)
                return Tried(ending=ending, shown=watched.shown, issue=issue)
        return Tried(ending=ending)

    def _known_to_hang(self, name: str, case: Case) -> KnownIssue | None:
        """The issue that has hung in this process and may again in this case."""
        for issue in self.known_issues:
            hung = issue.id in self.hangs.known and issue.concerns(self.engine, name)
            if hung and issue.hits(case):
                return issue
        return None

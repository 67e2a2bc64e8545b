"""Looks for a planted fault with the suites themselves: the same rows, draws and checks."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, cast

import properties
from fsdp_engine.contract.case import Case
from fsdp_engine.contract.errors import UnsupportedCase
from fsdp_engine.contract.protocol import Run
from oracles.verdict import Verdict
from properties.catalog import Check, property_id
from properties.covering import Axes, RowFilter
from properties.outcome import ending_of
from properties.profiles import Profile
from properties.suite import Search, Suite
from properties.tally import Tally

Item: TypeAlias = Axes | Case


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteTest:
    """One suite: the property it judges and the function that runs one item of it."""

    property_id: str
    name: str
    suite: Suite
    run_item: Callable[[Any, Any, Search], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Searching:
    """How suites are searched. `root` is where Hypothesis keeps its examples: empty at first."""

    profile: Profile
    seed: int
    root: Path

    def run(self, test: SuiteTest, item: Item, judge: object) -> None:
        """Search one item as the suite does; the same examples every time."""
        key = f"{test.name}[{item}]"
        search = Search(profile=self.profile, seed=self.seed, key=key, root=self.root)
        test.run_item(item, judge, search)


class _Seen(BaseException):
    """Carries a check out of a suite test; no `Exception`, so that no search goes on after it."""

    def __init__(self, check: Check) -> None:
        self.check = check


class Detected(BaseException):
    """A check accused the engine; no `Exception`, so that Hypothesis does not shrink it."""

    def __init__(self, case: Case, verdict: Verdict) -> None:
        super().__init__(str(verdict.mismatches[0]))
        self.case = case
        self.verdict = verdict


@dataclass(slots=True, kw_only=True)
class Watch:
    """Stands in for the judge: runs the check, counts, and stops at the first accusation."""

    run: Run
    num_cases: int = 0
    tallies: dict[str, Tally] = field(default_factory=dict)

    def __call__(self, check: Check, case: Case) -> None:
        try:
            verdict = ending_of(check, case, self.run).verdict
        except UnsupportedCase:
            return
        self.num_cases += verdict.outcome != "not_applicable"
        if verdict.outcome == "inconclusive":
            raise AssertionError(f"inconclusive: {verdict.reason}")
        if verdict.outcome == "fail":
            raise Detected(case, verdict)


@functools.cache
def suite_tests() -> tuple[SuiteTest, ...]:
    """Every suite under `properties/`, with the property it judges."""
    found: list[SuiteTest] = []
    for module_info in pkgutil.iter_modules(properties.__path__):
        if not module_info.name.startswith("test_"):
            continue
        module = importlib.import_module(f"properties.{module_info.name}")
        for name, test in vars(module).items():
            marks = [m for m in getattr(test, "pytestmark", ()) if m.name == "over"]
            if marks:
                found.append(
                    SuiteTest(
                        property_id=_judged_by(test.__wrapped__),
                        name=name,
                        suite=cast(Suite, marks[0].args[0]),
                        run_item=test,
                    )
                )
    return tuple(found)


def items_of(
    name: str, profile: Profile, *, first: RowFilter = lambda _: True
) -> list[tuple[SuiteTest, Item]]:
    """What the profile runs of a property; the rows that `first` accepts before all others.

    Every item has draws of its own, so their order does not decide whether a search finds a fault,
    only when.
    """
    items: list[tuple[SuiteTest, Item]] = [
        (test, item)
        for test in suite_tests()
        if test.property_id == name
        for item in test.suite.items(profile)
    ]
    return sorted(items, key=lambda pair: isinstance(pair[1], Axes) and not first(pair[1]))


def search(
    items: list[tuple[SuiteTest, Item]], watch: Watch, searching: Searching
) -> tuple[SuiteTest, Item, Detected] | None:
    """The first item in which the watch sees an accusation, and what it saw; None where none is."""
    for test, item in items:
        try:
            searching.run(test, item, watch)
        except Detected as detected:
            return test, item, detected
    return None


def _judged_by(test: Callable[[Any, Any], None]) -> str:
    """The property of a suite test: what it hands to the judge, whatever the case."""

    def note(check: Check, _case: Case) -> NoReturn:
        raise _Seen(check)

    try:
        test(None, note)
    except _Seen as seen:
        return property_id(seen.check)
    raise AssertionError(f"{test} judges nothing")

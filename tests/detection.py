"""Looks for a planted fault with the suites themselves: the same rows, draws and checks."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, cast

import properties
from fsdp_engine.contract.case import Case
from fsdp_engine.contract.errors import UnsupportedCase
from fsdp_engine.contract.protocol import Run
from oracles.verdict import Verdict
from properties.catalog import Check, property_id
from properties.outcome import ending_of
from properties.profiles import Profile
from properties.report import Tally
from properties.suite import Search, Suite


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteTest:
    """One suite: the property it judges and the function that runs one item of it."""

    property_id: str
    name: str
    suite: Suite
    run_item: Callable[[Any, Any, Search], None]


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


def suite_tests() -> Iterator[SuiteTest]:
    """Every suite under `properties/`, with the property it judges."""
    for module_info in pkgutil.iter_modules(properties.__path__):
        if not module_info.name.startswith("test_"):
            continue
        module = importlib.import_module(f"properties.{module_info.name}")
        for name, test in vars(module).items():
            marks = [m for m in getattr(test, "pytestmark", ()) if m.name == "over"]
            if marks:
                yield SuiteTest(
                    property_id=_judged_by(test.__wrapped__),
                    name=name,
                    suite=cast(Suite, marks[0].args[0]),
                    run_item=test,
                )


def search_property(name: str, watch: Watch, profile: Profile, *, seed: int, root: Path) -> None:
    """Run the suites of a property until `watch` raises `Detected`.

    `root` is where Hypothesis keeps its examples; an empty directory for an independent search.
    """
    for test in suite_tests():
        if test.property_id == name:
            for item in test.suite.items(profile):
                key = f"{test.name}[{item}]"
                search = Search(profile=profile, seed=seed, key=key, root=root)
                test.run_item(item, watch, search)


def _judged_by(test: Callable[[Any, Any], None]) -> str:
    """The property of a suite test: what it hands to the judge, whatever the case."""

    def note(check: Check, _case: Case) -> NoReturn:
        raise _Seen(check)

    try:
        test(None, note)
    except _Seen as seen:
        return property_id(seen.check)
    raise AssertionError(f"{test} judges nothing")

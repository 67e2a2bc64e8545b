"""Engines without a planted fault are judged by everything and must not be accused.

Cases come in lots: a lot is one suite's draws in one row. Everything follows from the number of the
lot, so lots can run in any order, on any process, and be skipped when they are done.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy

from fsdp_engine.contract.case import Case
from fsdp_engine.contract.case_file import case_id
from fsdp_engine.contract.errors import RunError, UnsupportedCase
from fsdp_engine.contract.observation import Observation
from fsdp_engine.contract.protocol import EngineTables, Run
from fsdp_engine.world.pool import WorldPool
from properties.catalog import Check, load_check
from properties.covering import FACTORS, Axes, is_possible
from properties.known_issues import KNOWN_ISSUES, known_issue
from properties.outcome import Watched, ending_of
from properties.profiles import PROFILES
from properties.repro import write_repro
from properties.tally import Tally
from tests.detection.search import Searching, SuiteTest, suite_tests

CASES_PER_LOT = 10
_MAX_TRIES = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Lot:
    """Some cases for one engine; `folder` is where what is accused is written.

    `own`: cases are judged by the property whose suite drew them and by no other.
    """

    engine: str
    number: int
    own: bool = False
    num_cases: int = CASES_PER_LOT
    folder: str = ".repro/clean"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What became of a lot. `accusations` are one line each, `endings` counts by outcome."""

    engine: str
    number: int
    num_cases: int
    endings: dict[str, int]
    known_issues: dict[str, int]
    accusations: tuple[str, ...]
    inconclusive: tuple[str, ...]

    def to_line(self) -> str:
        """One line of the file of finished lots."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_line(line: str) -> Judged:
        """Read what `to_line` wrote."""
        plain: dict[str, Any] = json.loads(line)
        lists = {name: tuple(plain[name]) for name in ("accusations", "inconclusive")}
        return Judged(**(plain | lists))


class _Remembering:
    """A run that executes a case once, however many checks ask for it."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._known: dict[str, Observation | RunError] = {}

    def __call__(self, case: Case) -> Observation:
        key = case_id(case)
        if key not in self._known:
            try:
                self._known[key] = self._run(case)
            except RunError as error:
                self._known[key] = error
        known = self._known[key]
        if isinstance(known, RunError):
            raise known
        return known

    def tables(
        self,
        *,
        mesh_shapes: tuple[tuple[int, int], ...] = (),
        strategies: tuple[tuple[int, bool], ...] = (),
    ) -> EngineTables:
        return self._run.tables(mesh_shapes=mesh_shapes, strategies=strategies)


@dataclass(slots=True, kw_only=True)
class _Collect:
    """Stands in for the judge: it only keeps the cases."""

    cases: list[Case] = field(default_factory=list)
    tallies: dict[str, Tally] = field(default_factory=dict)

    def __call__(self, _check: Check, case: Case) -> None:
        self.cases.append(case)


def draw(lot: Lot) -> tuple[str, tuple[Case, ...]]:
    """The cases of a lot and the property they are drawn for, in a row that the engine can run."""
    chosen = numpy.random.default_rng((lot.number, *lot.engine.encode()))
    tests = [test for test in suite_tests() if _rows(test)]
    while True:
        test = tests[chosen.integers(len(tests))]
        row = _row(test, chosen, lot.engine)
        if row is not None:
            break
    collect = _Collect()
    profile = dataclasses.replace(PROFILES["default"], examples=lot.num_cases)
    with tempfile.TemporaryDirectory(prefix="fsdp-clean-") as root:
        Searching(profile=profile, seed=lot.number, root=Path(root)).run(test, row, collect)
    return test.property_id, tuple(dict.fromkeys(collect.cases))


def judge_lot(lot: Lot) -> Judged:
    """Judge every case of a lot by every property that takes it, or by its own."""
    endings: Counter[str] = Counter()
    issues: Counter[str] = Counter()
    accusations: list[str] = []
    inconclusive: list[str] = []
    own, cases = draw(lot)
    with WorldPool(lot.engine, case_timeout_s=60.0) as pool:
        for case in cases:
            run = _Remembering(pool)
            for name in [own] if lot.own else _taking(case):
                check = load_check(name)
                outcome, told = _outcome(lot.engine, name, check, case, run)
                if outcome == "known_issue":
                    issues[told] += 1
                endings[outcome] += 1
                if outcome in ("fail", "inconclusive"):
                    path = write_repro(Path(lot.folder), case, property_id=name, engine=lot.engine)
                    line = f"{lot.engine} {name} {path}: {told}"
                    (accusations if outcome == "fail" else inconclusive).append(line)
    return Judged(
        engine=lot.engine,
        number=lot.number,
        num_cases=len(cases),
        endings=dict(endings),
        known_issues=dict(issues),
        accusations=tuple(accusations),
        inconclusive=tuple(inconclusive),
    )


def _outcome(engine: str, name: str, check: Check, case: Case, run: Run) -> tuple[str, str]:
    watched = Watched(run)
    try:
        ending = ending_of(check, case, watched)
    except UnsupportedCase as error:
        return "refused", str(error)
    except Exception as error:  # noqa: BLE001  a broken check must not end a run of thousands
        return "inconclusive", f"the check raised {type(error).__name__}: {error}"
    verdict = ending.verdict
    if verdict.outcome in ("fail", "inconclusive"):
        issue = known_issue(
            KNOWN_ISSUES, engine=engine, property_id=name, ran=watched.cases, ending=ending
        )
        if issue is not None:
            return "known_issue", issue.id
    told = verdict.reason or "; ".join(map(str, verdict.mismatches[:3]))
    return str(verdict.outcome), told


def _taking(case: Case) -> list[str]:
    """The properties that take the case; those over tables have cases of their own."""
    taking = [t.property_id for t in suite_tests() if t.suite.takes(case) and _rows(t)]
    return list(dict.fromkeys(taking))


def _rows(test: SuiteTest) -> bool:
    items = test.suite.items(PROFILES["smoke"])
    return bool(items) and isinstance(items[0], Axes) and not test.suite.on_device


def _row(test: SuiteTest, chosen: numpy.random.Generator, engine: str) -> Axes | None:
    """A row, drawn evenly, that the suite takes; None where none comes up."""
    where: Callable[[Axes], bool] = test.suite.where  # type: ignore[attr-defined]  # over rows
    fixed = _STRATEGIES.get(engine)
    for _ in range(_MAX_TRIES):
        values = {name: str(chosen.choice(options)) for name, options in FACTORS.items()}
        row = Axes(**(values | ({"strategy": fixed} if fixed else {})))
        if is_possible(row) and where(row):
            return row
    return None


_STRATEGIES = {"torch_fsdp1": "fsdp1", "torch_fsdp2": "fsdp2"}

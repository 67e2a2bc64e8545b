"""Suites: one line of judging, run over rows of the covering array times drawn cases.

A runner such as xdist spreads tests, not drawn cases, so every row is a test of its own with a
search of its own.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import math
import warnings
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias, cast

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from fsdp_engine.contract.case import Case
from fsdp_engine.contract.protocol import DeviceName
from properties.budget import OutOfTime
from properties.covering import Axes, RowFilter, axes_of, covering_array, spread, varied
from properties.judge import Judge, PropertyFailure
from properties.narrowing import within
from properties.profiles import Profile, settings_of
from properties.strategies.regions import is_small

Drawing: TypeAlias = Callable[[Axes], SearchStrategy[Case]]
SuiteTest: TypeAlias = Callable[[Case, Judge], None]
Wrapped: TypeAlias = "Callable[[Axes | Case, Judge, Search], None]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """How one test searches: its profile, its seed, and the key its failures are kept under.

    `database` is where they are kept instead of below `root`: the address of a Redis.
    """

    profile: Profile
    seed: int
    key: str
    root: Path
    database: str = ""


class Suite(Protocol):
    """What a suite is run over, one test each: rows to draw cases in, or cases of a table.

    `on_device`: it judges what shows on these devices alone; empty where it shows on all.
    """

    @property
    def on_device(self) -> tuple[DeviceName, ...]: ...

    def items(
        self,
        profile: Profile,
        *,
        strategies: Collection[str] = (),
        lacks: Collection[Mapping[str, str]] = (),
    ) -> tuple[Axes, ...] | tuple[Case, ...]:
        """What the profile takes of them for an engine with these strategies; all where none.

        Rows that the engine lacks are exchanged for what it has.
        """

    def takes(self, case: Case) -> bool:
        """Whether a case given by the user belongs into the suite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    where: RowFilter
    main: bool
    given: bool
    on_device: tuple[DeviceName, ...]
    times: float
    start: int

    def items(
        self,
        profile: Profile,
        *,
        strategies: Collection[str] = (),
        lacks: Collection[Mapping[str, str]] = (),
    ) -> tuple[Axes, ...]:
        array = covering_array(strength=profile.strength, max_world_size=profile.max_world_size)
        count = profile.main_rows if self.main else math.ceil(profile.rows * self.times)
        rows = [row for row in array if not strategies or row.strategy in strategies]
        rows = list(filter(self.where, within(rows, lacks)))
        if profile.small_first and not self.main:
            rows = list(filter(is_small, rows)) or rows
        return varied(rows, count=count, start=self.start)

    def takes(self, case: Case) -> bool:
        row = axes_of(case)
        fits = row is None or self.where(row)
        return self.given and fits and not case.engine.overrides


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    cases: Callable[[], tuple[Case, ...]]
    overrides: bool
    on_device: tuple[DeviceName, ...] = ()

    def items(
        self,
        profile: Profile,
        *,
        strategies: Collection[str] = (),  # noqa: ARG002  tables ask about no row
        lacks: Collection[Mapping[str, str]] = (),  # noqa: ARG002
    ) -> tuple[Case, ...]:
        return spread(self.cases(), count=profile.table_cases)

    def takes(self, case: Case) -> bool:
        return bool(case.engine.overrides) == self.overrides


def over_rows(
    draw: Drawing,
    *,
    where: RowFilter = lambda _: True,
    main: bool = False,
    given: bool = True,
    on_device: tuple[DeviceName, ...] = (),
    times: float = 1.0,
) -> Callable[[SuiteTest], Wrapped]:
    """Make a test of `(case, judge)` a suite over the rows `where` accepts.

    `main` takes as many rows as the profile allows a suite at all, `times` so many times what it
    allows others. With `given` False the suite takes no cases given by the user: another
    one of the same property does. `on_device` is for what shows on these alone.
    `@hypothesis.example(case=...)` may stand between this decorator and the function.
    """

    def decorate(test: SuiteTest) -> Wrapped:
        def run(row: Axes | Case, judge: Judge, search: Search) -> None:
            __tracebackhide__ = True
            if isinstance(row, Case):
                test(row, judge)
            else:
                _search(test, draw(row), judge, search)

        rows = _Rows(
            where=where,
            main=main,
            given=given,
            on_device=on_device,
            times=times,
            # Every suite has rows of its own, so that together they see more than each alone.
            start=zlib.crc32(f"{test.__module__}.{test.__qualname__}".encode()),
        )
        return _as_suite(test, run, rows)

    return decorate


def over_table(
    cases: Callable[[], tuple[Case, ...]], *, overrides: bool = False
) -> Callable[[SuiteTest], Wrapped]:
    """Make a test of `(case, judge)` a suite over the cases of a table.

    `overrides` says whether its cases have some; given cases are taken by that.
    """

    def decorate(test: SuiteTest) -> Wrapped:
        def run(row: Axes | Case, judge: Judge, search: Search) -> None:  # noqa: ARG001
            __tracebackhide__ = True
            assert isinstance(row, Case)
            test(row, judge)

        return _as_suite(test, run, _Table(cases=cases, overrides=overrides))

    return decorate


def _as_suite(test: SuiteTest, run: Wrapped, suite: Suite) -> Wrapped:
    @functools.wraps(test)
    def wrapped(row: Axes | Case, judge: Judge, search: Search) -> None:
        __tracebackhide__ = True
        failure: PropertyFailure | None = None
        try:
            run(row, judge, search)
        except PropertyFailure as error:
            failure = error
        if failure is not None:
            raise _settled(judge, failure)
        _skip_if_refused(judge)

    # pytest asks the signature for fixtures: those of this function, not of the wrapped one.
    vars(wrapped)["__signature__"] = inspect.signature(wrapped, follow_wrapped=False)
    return cast(Wrapped, pytest.mark.over(suite)(wrapped))


def _search(test: SuiteTest, cases: SearchStrategy[Case], judge: Judge, search: Search) -> None:
    __tracebackhide__ = True
    seeded = hypothesis.seed(_mixed(search.seed, search.key))
    with_settings = settings_of(
        search.profile, root=search.root, key=search.key, url=search.database
    )
    # The settings last: a seed takes the database away, which is to be kept.
    searched = with_settings(seeded(hypothesis.given(case=drawn(cases))(test)))
    failure: PropertyFailure | None = None
    with warnings.catch_warnings():
        # Hypothesis prints the arguments of a failure; its message has the case already.
        warnings.filterwarnings("ignore", message="Generating overly large repr")
        try:
            searched(judge=judge)
        except OutOfTime:
            return
        except PropertyFailure as error:
            failure = _told_briefly(error)
    if failure is not None:
        raise failure


def drawn(cases: SearchStrategy[Case]) -> SearchStrategy[Case]:
    """The same cases, and none without luck.

    Hypothesis begins every search with the simplest example. In a search of few examples that
    would be a large part of them, and the same one in every session.
    """
    return st.booleans().filter(bool).flatmap(lambda _: cases)


def _told_briefly(error: PropertyFailure) -> PropertyFailure:
    """The same failure without the search's frames and its print of the case.

    Of its notes only the one with the blob stays; the command is the last line.
    """
    blobs = [note.strip() for note in getattr(error, "__notes__", []) if "@reproduce" in note]
    return _with_blobs(error, blobs)


def _with_blobs(error: PropertyFailure, blobs: list[str]) -> PropertyFailure:
    message, _, command = str(error).rpartition("\n")
    return type(error)("\n".join([message, *blobs, command]))


def _settled(judge: Judge, failure: PropertyFailure) -> PropertyFailure:
    """What the judge has to say at the end, the blob of the search still in it."""
    settled = judge.settled(failure)
    if settled is failure:
        return failure
    return _with_blobs(
        settled, [line for line in str(failure).splitlines() if "@reproduce" in line]
    )


def _skip_if_refused(judge: Judge) -> None:
    """A test that judged nothing is shown as such; the report says so for whole properties."""
    reasons = [reason for tally in judge.tallies.values() for reason in tally.not_applicable]
    if reasons and not any(tally.judged for tally in judge.tallies.values()):
        pytest.skip(f"every case was refused: {reasons[0]}")


def _mixed(seed: int, key: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{key}".encode()).digest()[:8], "big")

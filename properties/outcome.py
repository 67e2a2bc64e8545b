"""One check on one case in one world, every way it can end turned into a verdict."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from fsdp_engine.contract.case import Case
from fsdp_engine.contract.errors import (
    EngineRaised,
    RankDied,
    RankHung,
    UnsupportedCase,
    WorldError,
)
from fsdp_engine.contract.observation import Observation
from fsdp_engine.contract.protocol import EngineTables, Run
from oracles.verdict import Mismatch, Verdict, failing
from properties.catalog import Check

_MAX_LINES = 25

Traces: TypeAlias = dict[int, str]


class Worlds(Run, Protocol):
    """Warm worlds; `fresh` runs every case in a new one."""

    @property
    def fresh(self) -> Run: ...


@dataclass(slots=True)
class Watched:
    """A run that keeps the cases that were run: a check may run others than its own.

    `refused` is the last that the engine would not run; `shown` is what the first of the others
    showed, None where it showed nothing.
    """

    run: Run
    cases: list[Case] = field(default_factory=list)
    refused: Case | None = None
    shown: Observation | None = None

    def __call__(self, case: Case) -> Observation:
        self.cases.append(case)
        try:
            observation = self.run(case)
        except UnsupportedCase:
            self.refused = self.cases.pop()
            raise
        self.shown = self.shown or observation
        return observation

    def tables(
        self,
        *,
        mesh_shapes: tuple[tuple[int, int], ...] = (),
        strategies: tuple[tuple[int, bool], ...] = (),
    ) -> EngineTables:
        return self.run.tables(mesh_shapes=mesh_shapes, strategies=strategies)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a case ended: its verdict, and one word for the way it came about.

    `how` tells different bugs apart while a failure is shrunk: `Failed`, `Died`, `Hung`,
    `WorldFailed`, `Flaked`, `Refused`, `NotRun`, `Fixed` or `Raised` with the exception's class
    name.
    """

    verdict: Verdict
    how: str


def ending_of(check: Check, case: Case, run: Run) -> Ending:
    """What the check says, or what the way the run ended says instead.

    An engine that raises or dies under a legal case has failed. A hang or a failing world is
    inconclusive.

    Raises:
        UnsupportedCase: the engine declines the case.
        EngineLoadError: the name leads to no engine.
    """
    try:
        return Ending(verdict=check(case, run), how="Failed")
    except EngineRaised as error:
        mismatches = [
            Mismatch(where=_ranks(ranks), got=_tail(trace), wanted="no exception")
            for trace, ranks in _by_trace(error.by_rank)
        ] or [Mismatch(where="run", got=str(error), wanted="no exception")]
        kinds = sorted(set(error.kinds.values()))
        return Ending(verdict=failing(*mismatches), how="Raised" + "".join(kinds[:1]))
    except RankDied as error:
        codes = ", ".join(f"rank {rank}: {code}" for rank, code in error.exit_codes.items())
        stacks = "\n".join(f"rank {rank}:\n{_tail(s)}" for rank, s in error.stacks.items())
        got = f"ended, exit codes {codes} ({error})\n{stacks}".rstrip()
        mismatch = Mismatch(where="rank processes", got=got, wanted="alive")
        return Ending(verdict=failing(mismatch), how="Died")
    except RankHung as error:
        stacks = "\n".join(f"rank {rank}:\n{_tail(s)}" for rank, s in error.stacks.items())
        reason = f"hang: {error}\n{error.divergence}\n{stacks}".rstrip()
        return Ending(verdict=inconclusive(reason), how="Hung")
    except WorldError as error:
        return Ending(verdict=inconclusive(f"the world failed: {error}"), how="WorldFailed")


def inconclusive(reason: str) -> Verdict:
    """Neither pass nor fail, and why."""
    return Verdict(outcome="inconclusive", reason=reason)


def _by_trace(by_rank: Traces) -> Iterable[tuple[str, list[int]]]:
    grouped: dict[str, list[int]] = {}
    for rank, trace in sorted(by_rank.items()):
        grouped.setdefault(trace, []).append(rank)
    return grouped.items()


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _tail(trace: str) -> str:
    lines = trace.rstrip().splitlines()
    cut = [f"({len(lines) - _MAX_LINES} lines before)"] if len(lines) > _MAX_LINES else []
    return "\n".join([*cut, *lines[-_MAX_LINES:]])

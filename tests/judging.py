"""Worlds that answer as told, and judges over them, for the tests of the judge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, cast

from fsdp_engine.contract.case import Case
from fsdp_engine.contract.errors import EngineRaised, RankDied, RankHung
from fsdp_engine.contract.observation import Numerics, Observation
from fsdp_engine.contract.protocol import EngineTables, Run
from oracles.verdict import Mismatch, Verdict, failing
from properties.issues.issue import KnownIssue
from properties.judge import Judge
from properties.strategies.tables import one_case
from properties.trial import Trial

Behaviour: TypeAlias = Callable[[Case], Verdict]

(CASE,) = one_case()
HAND_ON = "tests.judging:hand_on"

WRONG = failing(
    *(
        Mismatch(where=f"w[{i}]", got=str(i), wanted="0", off=float(i), allowed=1.0)
        for i in range(1, 9)
    ),
    margin=8.0,
    margin_kind="rigorous",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Told(Observation):
    """An observation of no ranks that says what the check is to say."""

    verdict: Verdict


class FakeWorlds:
    """Answers with a verdict inside what it shows; the check hands it on."""

    def __init__(self, warm: Behaviour, fresh: Behaviour | None = None) -> None:
        self._answer = warm
        self._fresh = fresh or warm
        self.num_runs = 0

    def __call__(self, case: Case) -> Observation:
        self.num_runs += 1
        return Told(numerics=cast(Numerics, None), ranks=(), verdict=self._answer(case))

    def tables(
        self,
        *,
        mesh_shapes: tuple[tuple[int, int], ...] = (),
        strategies: tuple[tuple[int, bool], ...] = (),
    ) -> EngineTables:
        raise NotImplementedError(mesh_shapes, strategies)

    @property
    def fresh(self) -> Run:
        fresh = FakeWorlds(self._fresh)
        self.num_runs += 1
        return fresh


def hand_on(case: Case, run: Run) -> Verdict:
    """A check that says what the fake world says."""
    return cast(Told, run(case)).verdict


def raising(error: Exception) -> Behaviour:
    def behave(_: Case) -> Verdict:
        raise error

    return behave


HANG = RankHung("12 s passed", stacks={0: "in all_gather"}, divergence="rank 1 is elsewhere")
RAISED = EngineRaised(
    "rank 0 raised",
    by_rank={0: "Traceback: boom", 1: "Traceback: boom"},
    kinds={0: "ZeroDivisionError", 1: "ZeroDivisionError"},
    num_collectives={0: 0, 1: 0},
)
DIED = RankDied("rank 1 ended", exit_codes={1: -11}, stacks={})


def judge_of(
    folder: Path, warm: Behaviour, fresh: Behaviour | None = None, *issues: KnownIssue
) -> Judge:
    return Judge(
        trial=Trial(worlds=FakeWorlds(warm, fresh), engine="fake", known_issues=issues),
        repro_folder=folder,
    )

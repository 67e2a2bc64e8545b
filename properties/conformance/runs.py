"""What became of each engine's session, as plain data: what the page is made of."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

SCHEMA = 1

Kind: TypeAlias = Literal[
    "fail", "inconclusive", "known_issue", "pass", "not_applicable", "not_run"
]
KINDS: dict[Kind, str] = {
    "pass": "every judged case passed",
    "known_issue": "passed but for cases of known issues, which are named",
    "not_applicable": "no case applies to the engine, for the reasons counted",
    "inconclusive": "a hang, a flake or a failing world: no verdict, never a pass",
    "fail": "a case failed that no known issue explains, or a known issue is gone",
    "not_run": "no case was drawn: the engine lacks all rows, or it shows on a device alone",
}
"""What a cell can say, and what that means."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRun:
    """One engine's session. `report` is its report file's content, None where there is none.

    `reason` says why there is none, or why the session ended as it did; empty where all is well.
    """

    engine: str
    report: dict[str, Any] | None = None
    reason: str = ""
    exit_code: int = 0

    @property
    def properties(self) -> dict[str, dict[str, Any]]:
        """What it says of each property, by name."""
        listed = [] if self.report is None else self.report["properties"]
        return {entry["id"]: entry for entry in listed}

    @property
    def kinds(self) -> Counter[Kind]:
        """How many properties ended how."""
        return Counter(kind_of(entry) for entry in self.properties.values())


def kind_of(entry: dict[str, Any] | None) -> Kind:
    """What the cell of a property says; None: the session has nothing about it."""
    kind: Kind = "not_run" if entry is None else entry["verdict"]
    assert kind in KINDS
    return kind


def is_finite(margin: float) -> bool:
    """The report writes the largest number where there is none."""
    return margin < sys.float_info.max


def to_json(runs: Sequence[EngineRun]) -> str:
    """All sessions in one file."""
    engines = [
        {
            "engine": run.engine,
            "ran": run.report is not None,
            "reason": run.reason,
            "exit_code": run.exit_code,
            "report": run.report,
        }
        for run in runs
    ]
    return json.dumps({"schema": SCHEMA, "engines": engines}, indent=1, allow_nan=False) + "\n"


def from_json(text: str) -> tuple[EngineRun, ...]:
    """Read what `to_json` wrote."""
    return tuple(
        EngineRun(
            engine=entry["engine"],
            report=entry["report"],
            reason=entry["reason"],
            exit_code=entry["exit_code"],
        )
        for entry in json.loads(text)["engines"]
    )

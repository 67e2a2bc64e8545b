"""What a session judged: tallies per property, the report file, the table at the end."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from properties.covering import Axes, feasible_pairs, pairs_judged
from properties.issues.issue import KnownIssue
from properties.known_issues import KNOWN_ISSUES
from properties.tally import Tally

SCHEMA = 1


@dataclass(slots=True, kw_only=True)
class Report:
    """A session: where and how it ran, its tallies, and the moments its tests began and ended.

    `unreplayable`: compute dtypes in which the probe at its start did not confirm that replayed
    gradients are bit-equal, and why. `lacks` is where the engine says that no case applies to it.
    Of `known_issues` those of the engine are listed, met or not.
    """

    engine: str
    device: str
    versions: dict[str, str]
    profile: str
    seed: int
    max_world_size: int
    unreplayable: dict[str, str] = field(default_factory=dict)
    lacks: tuple[dict[str, str], ...] = ()
    known_issues: tuple[KnownIssue, ...] = KNOWN_ISSUES
    tallies: dict[str, Tally] = field(default_factory=dict)
    began: float | None = None
    ended: float | None = None

    def add(self, tallies: dict[str, dict[str, Any]]) -> None:
        """Count what a test handed over."""
        for name, plain in tallies.items():
            self.tallies.setdefault(name, Tally()).add(Tally.from_plain(plain))

    def saw_test(self, start: float, stop: float) -> None:
        """Extend the session by a test that ran from `start` to `stop`, in seconds of one clock."""
        self.began = start if self.began is None else min(self.began, start)
        self.ended = stop if self.ended is None else max(self.ended, stop)

    @property
    def wall_seconds(self) -> float:
        """From the first test's start to the last one's end: the session without set-up."""
        return self.ended - self.began if self.began is not None and self.ended is not None else 0.0

    def pairs(self) -> tuple[int, int]:
        """Pairs of main-axis values that judged cases cover, and all feasible ones."""
        rows = [Axes.of(row) for tally in self.tallies.values() for row in tally.rows]
        covered = pairs_judged(rows, max_world_size=self.max_world_size)
        return len(covered), len(feasible_pairs(max_world_size=self.max_world_size))

    def to_json(self) -> str:
        """The report file's text."""
        covered, feasible = self.pairs()
        judged = sum(tally.judged for tally in self.tallies.values())
        wall = self.wall_seconds
        report = {
            "schema": SCHEMA,
            "engine": self.engine,
            "device": self.device,
            "versions": self.versions,
            "profile": self.profile,
            "seed": self.seed,
            "wall_seconds": round(wall, 3),
            "cases_per_second": round(judged / wall, 3) if wall else 0.0,
            "pairs_feasible": feasible,
            "pairs_judged": covered,
            "unreplayable": dict(sorted(self.unreplayable.items())),
            "lacks": list(self.lacks),
            "known_issues": [self._issue(issue) for issue in self._own_issues()],
            "properties": [_property(name, tally) for name, tally in sorted(self.tallies.items())],
        }
        return json.dumps(report, indent=2, allow_nan=False) + "\n"

    def write(self, path: Path) -> None:
        """Write the report file, folders included."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.to_json(), encoding="utf-8")

    def table(self) -> list[str]:
        """The lines shown at the end of a run."""
        header = ("property", "verdict", "judged", "worlds", "worst margin", "seconds")
        rows = [header, *(_line(name, tally) for name, tally in sorted(self.tallies.items()))]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        covered, feasible = self.pairs()
        probed = self.probe_lines() if self.unreplayable else []
        counted = [*lines, f"pairs {covered}/{feasible}"]
        return [
            *counted,
            *probed,
            *self.note_lines(),
            *self.known_issue_lines(),
            *self.unsatisfiable(),
        ]

    def note_lines(self) -> list[str]:
        """One line for every condition under which cases were judged, with how many."""
        return [
            f"{name}: in {count} of {tally.judged} cases {note}"
            for name, tally in sorted(self.tallies.items())
            for note, count in sorted(tally.notes.items())
        ]

    def known_issue_lines(self) -> list[str]:
        """One line for every known issue that was met, or that no longer shows."""
        told = [self._issue(issue) for issue in self._own_issues()]
        return [
            f"known issue {issue['id']}: {issue['cases']} cases"
            + (f", NO LONGER SHOWS in {issue['fixed']}" if issue["fixed"] else "")
            + f" ({issue['reference']})"
            for issue in told
            if issue["cases"] or issue["fixed"]
        ]

    def _own_issues(self) -> list[KnownIssue]:
        return [issue for issue in self.known_issues if self.engine in issue.engines]

    def _issue(self, issue: KnownIssue) -> dict[str, Any]:
        found = {name: tally.known_issue[issue.id] for name, tally in sorted(self.tallies.items())}
        return {
            "id": issue.id,
            "reason": issue.reason,
            "reference": issue.reference,
            "cases": sum(found.values()),
            "found_by": {name: count for name, count in found.items() if count},
            "fixed": sum(tally.fixed[issue.id] for tally in self.tallies.values()),
        }

    def probe_lines(self) -> list[str]:
        """What the probe at the start of the session found."""
        if not self.unreplayable:
            found = "within their bound" if self.device == "cuda" else "bit-equal"
            return [f"probe: replayed gradients are {found} on this machine"]
        return [
            f"probe: replay is not bit-equal in {dtype}, nothing is judged by it there ({found})"
            for dtype, found in sorted(self.unreplayable.items())
        ]

    def unsatisfiable(self) -> list[str]:
        """One line for every property of which the engine refused all cases."""
        return [
            f"property {name}: every case was refused: {'; '.join([*tally.not_applicable][:3])}"
            for name, tally in sorted(self.tallies.items())
            if tally.unsatisfiable
        ]


def _property(name: str, tally: Tally) -> dict[str, Any]:
    return {
        "id": name,
        "drawn": tally.drawn,
        "judged": tally.judged,
        "not_applicable": dict(sorted(tally.not_applicable.items())),
        "inconclusive": tally.inconclusive,
        "known_issue": dict(sorted(tally.known_issue.items())),
        "fixed": dict(sorted(tally.fixed.items())),
        "failed": tally.failed,
        "cases_per_world_size": dict(sorted(tally.worlds.items(), key=lambda item: int(item[0]))),
        "verdict": tally.verdict,
        "worst_margin": _finite(tally.worst_margin),
        "margin_kind": tally.margin_kind,
        "seconds": round(tally.seconds, 3),
        "case_ids": sorted(set(tally.case_ids)),
        "notes": dict(sorted(tally.notes.items())),
        "failures": tally.failures,
    }


def _finite(margin: float | None) -> float | None:
    """JSON has no infinity: the largest number stands for it."""
    return None if margin is None else min(margin, sys.float_info.max)


def _line(name: str, tally: Tally) -> tuple[str, ...]:
    worlds = " ".join(f"{size}:{n}" for size, n in sorted(tally.worlds.items()))
    margin = "-" if tally.worst_margin is None else f"{tally.worst_margin:.4g}"
    if tally.worst_margin is not None:
        margin += f" ({tally.margin_kind})"
    verdict = tally.verdict.replace("_", " ")
    return (name, verdict, str(tally.judged), worlds or "-", margin, f"{tally.seconds:.1f}")

"""The counts of one property.

A tally counts cases: `drawn` = `judged` + refused + `inconclusive`, and `judged` = passed +
`failed` + known issues. Tests hand their tallies over as plain data, so that the counts of several
worker processes add up and nothing is lost when one of them dies.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias

from fsdp_engine.contract.case import Case
from fsdp_engine.contract.case_file import case_id
from oracles.verdict import MarginKind, Verdict
from properties.covering import axes_of

PropertyVerdict: TypeAlias = Literal[
    "pass", "fail", "inconclusive", "not_applicable", "known_issue"
]

_COUNTERS = ("not_applicable", "known_issue", "fixed", "worlds", "notes")


@dataclass(slots=True, kw_only=True)
class Tally:
    """Counts of one property.

    `refused_by_engine` counts those of `not_applicable` that the engine declined, the others are
    what the check itself has nothing to say about. `known_issue` counts failed cases by the issue
    that explains them, `fixed` those of `failed` that passed where an issue must show. `rows` are
    the main axes of the judged cases, `notes` counts under which conditions they were judged.
    `failures` has the smallest case of each search that ended
    in a failure or without a verdict, as `properties.failure` writes it down.
    """

    drawn: int = 0
    judged: int = 0
    not_applicable: Counter[str] = field(default_factory=Counter)
    refused_by_engine: int = 0
    inconclusive: int = 0
    known_issue: Counter[str] = field(default_factory=Counter)
    fixed: Counter[str] = field(default_factory=Counter)
    failed: int = 0
    worlds: Counter[str] = field(default_factory=Counter)
    worst_margin: float | None = None
    margin_kind: MarginKind = "exact"
    seconds: float = 0.0
    case_ids: list[str] = field(default_factory=list)
    rows: set[tuple[str, ...]] = field(default_factory=set)
    notes: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)

    def refuse(self, reason: str, *, by_engine: bool) -> None:
        """Count a case that does not apply; it covers nothing."""
        self.drawn += 1
        self.not_applicable[reason] += 1
        self.refused_by_engine += by_engine

    def add_inconclusive(self) -> None:
        """Count a case without a verdict: a hang, a failing world, a flake."""
        self.drawn += 1
        self.inconclusive += 1

    def add_judged(self, case: Case, verdict: Verdict, known_issue: str | None) -> None:
        """Count a case that passed, failed or failed in a way that is known."""
        self.drawn += 1
        self.judged += 1
        if known_issue is not None:
            self.known_issue[known_issue] += 1
        elif verdict.outcome == "fail":
            self.failed += 1
        self.worlds[str(case.mesh.world_size)] += 1
        self.case_ids.append(case_id(case))
        self.notes.update(verdict.notes)
        row = axes_of(case)
        if row is not None:
            self.rows.add(tuple(value for _, value in row.items()))
        self._add_margin(verdict.margin, verdict.margin_kind)

    def add(self, other: Tally) -> None:
        """Count the other tally's cases as well."""
        self.drawn += other.drawn
        self.judged += other.judged
        self.not_applicable += other.not_applicable
        self.refused_by_engine += other.refused_by_engine
        self.inconclusive += other.inconclusive
        self.known_issue += other.known_issue
        self.fixed += other.fixed
        self.failed += other.failed
        self.worlds += other.worlds
        self.seconds += other.seconds
        self.case_ids += other.case_ids
        self.rows |= other.rows
        self.notes += other.notes
        self.failures += other.failures
        self._add_margin(other.worst_margin, other.margin_kind)

    def _add_margin(self, margin: float | None, kind: MarginKind) -> None:
        if margin is None:
            return
        known = math.inf if math.isnan(margin) else margin
        if self.worst_margin is None or known > self.worst_margin:
            self.worst_margin, self.margin_kind = known, kind

    @property
    def verdict(self) -> PropertyVerdict:
        """Of the whole property; one inconclusive case is enough for inconclusive."""
        if self.failed:
            return "fail"
        if self.inconclusive:
            return "inconclusive"
        if self.known_issue:
            return "known_issue"
        return "pass" if self.judged else "not_applicable"

    @property
    def unsatisfiable(self) -> bool:
        """Whether the engine refused every case there was."""
        return 0 < self.refused_by_engine == self.drawn

    def to_plain(self) -> dict[str, Any]:
        """As values that any process can send and `from_plain` reads."""
        plain = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        counted = {name: dict(plain[name]) for name in _COUNTERS}
        return plain | counted | {"rows": [list(row) for row in sorted(self.rows)]}

    @staticmethod
    def from_plain(plain: dict[str, Any]) -> Tally:
        """Read what `to_plain` wrote."""
        counted = {name: Counter(plain[name]) for name in _COUNTERS}
        return Tally(**(plain | counted | {"rows": {tuple(row) for row in plain["rows"]}}))

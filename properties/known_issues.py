"""Failures that are known, with where they are told: reported as such, never as a pass.

An issue names the engine, the property and the cases it hits. A failure of another kind on the
same cases is hidden by it, so the predicate is as narrow as it can be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from fsdp_engine.contract.case import Case

Predicate: TypeAlias = Callable[[Case], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownIssue:
    """A known failure: a stable id, whose it is, and where to read about it."""

    id: str
    engine: str
    property: str
    hits: Predicate
    reference: str


KNOWN_ISSUES: tuple[KnownIssue, ...] = ()
"""None at present: the shipped adapters decline what their engine cannot do."""


def known_issue(
    issues: tuple[KnownIssue, ...], *, engine: str, property_id: str, case: Case
) -> str | None:
    """The id of the first issue that explains a failure of the case; None where none does."""
    for issue in issues:
        if (issue.engine, issue.property) == (engine, property_id) and issue.hits(case):
            return issue.id
    return None

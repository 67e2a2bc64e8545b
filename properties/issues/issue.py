"""What a known issue is, and when a failure is one.

An issue names its engines, the properties it breaks, the cases it may show in and the ways a case
then ends; a failure of another kind on the same cases is not excused. Issues are strict: where
`must` holds and the property passes, the issue no longer shows and the session fails, so that the
entry is removed or narrowed. `must` is a predicate of its own because `hits` may have to ask for
too much, where what shows depends on the weights or on a plan that only the engine knows; each
case that `must` accepts fails. Predicates see every case that a check ran, which may be others than
the one it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import TypeAlias

from fsdp_engine.contract.case import Case, Strategy
from fsdp_engine.contract.protocol import DEVICES, DeviceName
from properties.outcome import Ending

Predicate: TypeAlias = Callable[[Case], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownIssue:
    """A known failure: a stable id, whose it is, what it is, and where to read about it.

    `ends` are the ways of `Ending.how`; `says`, where not empty, are words of which the failure has
    one. Without `properties` every property that runs such a case is hit. `must_in` are the
    properties in which every case of `must` fails; without any, all that are hit. An issue with
    `Hung` among its ends is run once in a process; other cases that it hits count as not run then.
    `devices` are those it shows on.
    """

    id: str
    engines: tuple[str, ...]
    reason: str
    reference: str
    hits: Predicate
    must: Predicate
    ends: tuple[str, ...]
    says: tuple[str, ...] = ()
    properties: tuple[str, ...] = ()
    must_in: tuple[str, ...] = ()
    devices: tuple[DeviceName, ...] = DEVICES

    @property
    def may_hang(self) -> bool:
        return "Hung" in self.ends

    def concerns(self, engine: str, property_id: str) -> bool:
        """Whether it is one of that engine's and breaks that property."""
        return engine in self.engines and (not self.properties or property_id in self.properties)

    def explains(self, ending: Ending) -> bool:
        """Whether a case that it hits ends like that."""
        if ending.how not in self.ends:
            return False
        told = [ending.verdict.reason, *map(str, ending.verdict.mismatches)]
        return not self.says or any(word in line for word in self.says for line in told)


def under(strategy: Strategy, predicate: Predicate) -> Predicate:
    """The predicate in cases of one strategy alone: some engines have both."""
    return lambda case: case.engine.strategy == strategy and predicate(case)


def all_under(strategy: Strategy, *issues: KnownIssue) -> tuple[KnownIssue, ...]:
    """The issues in cases of one strategy alone."""
    return tuple(
        replace(issue, hits=under(strategy, issue.hits), must=under(strategy, issue.must))
        for issue in issues
    )


def all_of(first: Predicate, *others: Predicate) -> Predicate:
    """All predicates hold."""
    return lambda case: first(case) and all(other(case) for other in others)


def shown_on(device: DeviceName, issues: Collection[KnownIssue]) -> tuple[KnownIssue, ...]:
    """Those of the issues that show on a device."""
    return tuple(issue for issue in issues if device in issue.devices)


def known_issue(
    issues: Collection[KnownIssue],
    *,
    engine: str,
    property_id: str,
    ran: Collection[Case],
    ending: Ending,
) -> KnownIssue | None:
    """The first issue that explains how the cases ended that were run; None where none does."""
    for issue in issues:
        explains = issue.concerns(engine, property_id) and issue.explains(ending)
        if explains and any(map(issue.hits, ran)):
            return issue
    return None


def fixed_issue(
    issues: Collection[KnownIssue], *, engine: str, property_id: str, ran: Collection[Case]
) -> KnownIssue | None:
    """The first issue that a passing property shows to be gone; None where none is."""
    for issue in issues:
        certain = not issue.must_in or property_id in issue.must_in
        if certain and issue.concerns(engine, property_id) and any(map(issue.must, ran)):
            return issue
    return None

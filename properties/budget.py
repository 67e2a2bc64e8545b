"""A session that may take so many minutes and no more: which tests it runs, and when it stops.

No test and no case begins when the time is nearly over. Tests run in an order drawn from the seed,
so that every property has its share of a short session and all rows have theirs over many; those
that have failed before, and whose examples are kept, come first.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

RESERVE = 0.05
"""The part of the time in which nothing begins: what runs comes to its end in it."""


class OutOfTime(KeyboardInterrupt):
    """Ends a search that has found nothing when the time is over.

    Of an interrupt alone Hypothesis keeps no example: whatever else is raised counts as found.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """When the last case may begin, in seconds of `time.time`, which all processes share."""

    minutes: float
    ends: float

    @staticmethod
    def from_start(minutes: float) -> Budget:
        """The budget of this process's session: its own start counts."""
        ends = _started() + 60.0 * minutes * (1.0 - RESERVE)
        return Budget(minutes=minutes, ends=ends)

    @property
    def seconds_left(self) -> float:
        return self.ends - time.time()

    @property
    def is_over(self) -> bool:
        return self.seconds_left < 0.0


def _started() -> float:
    own = Path("/proc/self")
    return own.stat().st_ctime if own.exists() else time.time()


def in_order(
    names: Iterable[str], *, seed: int, has_failed: Callable[[str], bool]
) -> dict[str, tuple[bool, bytes]]:
    """Keys to sort tests by: failures of earlier sessions first, then as the seed has it."""
    return {
        name: (not has_failed(name), hashlib.sha256(f"{seed}/{name}".encode()).digest())
        for name in names
    }

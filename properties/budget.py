"""A session that may take so many minutes and no more: which tests it runs, and when it stops.

No test begins when the time is nearly over. Tests run in an order drawn from the seed, so that
every property has its share of a short session and all rows have theirs over many; those that have
failed before, and whose examples are kept, come first.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

RESERVE = 0.05
"""The part of the time in which nothing begins: tests that run come to their end in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """When the last test may begin, in seconds of `time.time`, which all processes share."""

    minutes: float
    ends: float

    @staticmethod
    def from_now(minutes: float) -> Budget:
        """The budget of a session that starts now."""
        return Budget(minutes=minutes, ends=time.time() + 60.0 * minutes * (1.0 - RESERVE))

    @property
    def is_over(self) -> bool:
        return time.time() > self.ends


def in_order(
    names: Iterable[str], *, seed: int, has_failed: Callable[[str], bool]
) -> dict[str, tuple[bool, bytes]]:
    """Keys to sort tests by: failures of earlier sessions first, then as the seed has it."""
    return {
        name: (not has_failed(name), hashlib.sha256(f"{seed}/{name}".encode()).digest())
        for name in names
    }

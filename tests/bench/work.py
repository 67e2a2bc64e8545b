"""How much a run of the bench measures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Rounds of every timing, and how many faults are shrunk; None means all."""

    rounds: int
    num_faults: int | None

"""Robust timing on a machine that others use as well: interleaved rounds, medians of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

Action = Callable[[], object]


def interleaved(actions: Mapping[str, Action], *, rounds: int) -> dict[str, list[float]]:
    """Seconds of every action in every round.

    A round runs each action once, beginning with another one than the round before: what slows the
    machine down for a while slows all of them down. One round goes ahead unmeasured.
    """
    names = list(actions)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-1, rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            began = time.perf_counter()
            actions[name]()
            if number >= 0:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def median_ratio(ones: Sequence[float], others: Sequence[float]) -> float:
    """The median of the ratios within a round, which is steadier than the ratio of the medians."""
    return statistics.median(one / other for one, other in zip(ones, others, strict=True))

"""Seconds of a judged case in a warm world of 1 to 16 ranks."""

from __future__ import annotations

import statistics

from fsdp_engine.world.pool import WorldPool
from tests.bench.speed import judged
from tests.bench.table import Line
from tests.bench.timing import interleaved
from tests.bench.typical import ENGINE
from tests.bench.work import Effort

SIZES = (16, 8, 4, 2, 1)
"""The largest first: a pool's world serves every smaller case."""


def measure(effort: Effort) -> list[Line]:
    """One line per size; the growth per rank is what the cores leave of it."""
    with WorldPool(ENGINE, case_timeout_s=120.0) as pool:
        actions = {str(size): judged(pool, size) for size in SIZES}
        seconds = interleaved(actions, rounds=max(3, effort.rounds // 3))
    typical = {size: statistics.median(seconds[str(size)]) for size in SIZES}
    lines = [
        Line(
            part="growth",
            name=f"{size} ranks: a case",
            value=typical[size],
            unit="s",
            note=f"{typical[size] / size * 1e3:.1f} ms a rank",
        )
        for size in reversed(SIZES)
    ]
    ratio = typical[16] / typical[1]
    return [*lines, Line(part="growth", name="16 ranks over 1", value=ratio, unit="times")]

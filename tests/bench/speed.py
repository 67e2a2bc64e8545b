"""Cases per second, oracles included: in a warm world and in a fresh one, on 2 and 4 ranks."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from fsdp_engine.contract.protocol import Run
from fsdp_engine.world.pool import WorldPool
from tests.bench.table import Line
from tests.bench.timing import interleaved
from tests.bench.typical import ENGINE, main_check, typical_case
from tests.bench.work import Effort

TARGETS = {
    ("warm", 2): "<= 0.06 s",
    ("warm", 4): "<= 0.1 s",
    ("fresh", 2): "<= 0.15 s",
    ("fresh", 4): "<= 0.3 s",
}


def measure(effort: Effort) -> list[Line]:
    """Seconds of a judged case and their inverse, all kinds side by side."""
    with WorldPool(ENGINE) as pool:
        actions = {
            f"{kind} {size}": judged(run, size)
            for size in (4, 2)
            for kind, run in (("warm", pool), ("fresh", pool.fresh))
        }
        seconds = interleaved(actions, rounds=effort.rounds)
    lines = []
    for (kind, size), target in TARGETS.items():
        typical = statistics.median(seconds[f"{kind} {size}"])
        name = f"{kind} world, {size} ranks"
        lines.append(
            Line(part="speed", name=f"{name}: a case", value=typical, unit="s", target=target)
        )
        lines.append(Line(part="speed", name=f"{name}: cases", value=1 / typical, unit="/s"))
    return lines


def judged(run: Run, world_size: int) -> Callable[[], None]:
    """Run the typical case and judge it; it passes."""
    case, check = typical_case(world_size), main_check()

    def action() -> None:
        verdict = check(case, run)
        assert verdict.outcome == "pass", verdict

    return action

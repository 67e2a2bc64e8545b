"""What the harness costs its ranks, over a bare loop that does the same work and nothing else."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from fsdp_engine.world.pool import WorldPool
from tests.bench.speed import judged
from tests.bench.table import Line
from tests.bench.timing import interleaved, median_ratio
from tests.bench.typical import ENGINE, typical_case
from tests.bench.work import Effort

SIZES = (4, 2)
CASES_PER_ROUND = 10


def measure(effort: Effort) -> list[Line]:
    """Ratios per case: ranks of the harness to the bare loop with and without a new group."""
    lines = []
    with WorldPool(ENGINE) as pool:
        for size in SIZES:
            lines += _measured(pool, size, rounds=effort.rounds)
    return lines


def _measured(pool: WorldPool, size: int, *, rounds: int) -> list[Line]:
    case = typical_case(size)
    judge = judged(pool, size)
    with bare_loop(size) as bare:
        actions = {
            "ranks": lambda: [pool(case) for _ in range(CASES_PER_ROUND)],
            "judged": lambda: [judge() for _ in range(CASES_PER_ROUND)],
            "group": lambda: bare.run("group", CASES_PER_ROUND),
            "standing": lambda: bare.run("standing", CASES_PER_ROUND),
        }
        seconds = interleaved(actions, rounds=rounds)
    typical = statistics.median(seconds["group"]) / CASES_PER_ROUND
    pairs = (
        ("ranks of the harness over the bare loop", "ranks", "group", "<= 1.15"),
        ("the same over a loop with a standing group", "ranks", "standing", ""),
        ("oracles included, over the bare loop", "judged", "group", ""),
    )
    return [
        Line(part="overhead", name=f"bare loop, {size} ranks: a case", value=typical, unit="s"),
        *(
            Line(
                part="overhead",
                name=f"{name}, {size} ranks",
                value=median_ratio(seconds[one], seconds[other]),
                unit="times",
                target=target,
            )
            for name, one, other, target in pairs
        ),
    ]


class BareLoop:
    """Ranks without a harness, in processes of their own; each command is one line."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, kind: str, count: int) -> None:
        """Run the case `count` times, in a new group each (`group`) or in one (`standing`)."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{kind} {count}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer == "done\n", f"the bare loop ended: {answer!r}"


@contextmanager
def bare_loop(size: int) -> Iterator[BareLoop]:
    """A running bare loop of `size` ranks, ended on exit."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.bench.bare", str(size)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield BareLoop(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()

"""The typical case as one of torch's own multi-process tests, against our fresh world."""

from __future__ import annotations

import importlib.util
import statistics
import unittest
from collections.abc import Callable

from fsdp_engine.world.pool import WorldPool
from tests.bench.speed import judged
from tests.bench.table import Line
from tests.bench.timing import interleaved, median_ratio
from tests.bench.typical import ENGINE
from tests.bench.work import Effort

SIZES = (4, 2)
TARGET = {4: ">= 60 times", 2: ""}


def measure(effort: Effort) -> list[Line]:
    """Seconds of a spawned test, and how many fresh worlds of ours fit into them."""
    if importlib.util.find_spec("expecttest") is None:
        note = "torch's test case needs the package expecttest"
        return [Line(part="rival", name="MultiProcessTestCase", value=None, unit="s", note=note)]
    from tests.bench import multi_process

    lines = []
    with WorldPool(ENGINE) as pool:
        for size in SIZES:
            actions = {"ours": judged(pool.fresh, size), "rival": _run(multi_process.CASES[size])}
            seconds = interleaved(actions, rounds=max(1, effort.rounds // 5))
            lines.append(
                Line(
                    part="rival",
                    name=f"MultiProcessTestCase, {size} ranks",
                    value=statistics.median(seconds["rival"]),
                    unit="s",
                )
            )
            lines.append(
                Line(
                    part="rival",
                    name=f"over our fresh world, {size} ranks",
                    value=median_ratio(seconds["rival"], seconds["ours"]),
                    unit="times",
                    target=TARGET[size],
                )
            )
    return lines


def _run(test: type[unittest.TestCase]) -> Callable[[], None]:
    def action() -> None:
        result = unittest.TestResult()
        test("test_gradients").run(result)
        assert result.wasSuccessful(), result.errors + result.failures

    return action

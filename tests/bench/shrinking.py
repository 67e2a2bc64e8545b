"""From the first accusation to the minimal case, over the library of faults."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from properties.covering import spread
from tests.bench.table import Line
from tests.bench.work import Effort
from tests.detection.measure import measure as search_and_shrink
from tests.detection.parallel import done_in_parallel, num_cores
from tests.detection.shrinking import Minimal, phrase
from tests.detection.summary import percentile
from tests.faults.catalogue import FAULTS


def measure(effort: Effort) -> list[Line]:
    """Seconds and cases of shrinking, as the suites do it, and how large what is left is."""
    faults = spread(FAULTS, count=effort.num_faults or len(FAULTS))
    # The first property that must find it finds it; the search itself is `make detection`'s matter.
    tasks = [replace(fault, found_by=fault.found_by[:1]) for fault in faults]
    work = partial(search_and_shrink, seeds=(0,), shrinks=True)
    measured = list(done_in_parallel(work, tasks, jobs=num_cores()))
    minimal = [one.minimal for one in measured if one.minimal is not None]
    missed = sorted(one.fault.name for one in measured if one.minimal is None)
    return lines_of(minimal, num_faults=len(tasks), missed=missed)


def lines_of(minimal: Sequence[Minimal], *, num_faults: int, missed: Sequence[str]) -> list[Line]:
    """The lines of minimal cases that were reached."""
    note = f"not found: {', '.join(missed)}" if missed else ""
    lines = [
        Line(
            part="shrinking",
            name=f"faults shrunk, of {num_faults}",
            value=len(minimal),
            unit="",
            note=note,
        )
    ]
    if not minimal:
        return lines
    seconds = [one.seconds for one in minimal]
    slowest = max(minimal, key=lambda one: one.seconds)
    ranks = [one.case.mesh.world_size for one in minimal]
    actions = [len(one.case.program) for one in minimal]
    for name, value, unit, target, note in (
        ("to the minimal case, median", statistics.median(seconds), "s", "", ""),
        ("to the minimal case, p90", percentile(seconds, 0.9), "s", "<= 60 s", ""),
        ("to the minimal case, worst", slowest.seconds, "s", "", phrase(slowest.case)),
        (
            "cases run for it, median",
            statistics.median(one.num_cases for one in minimal),
            "cases",
            "",
            "",
        ),
        ("ranks left, median", statistics.median(ranks), "ranks", "", f"at most {max(ranks)}"),
        ("actions left, median", statistics.median(actions), "", "", f"at most {max(actions)}"),
    ):
        lines.append(
            Line(part="shrinking", name=name, value=value, unit=unit, target=target, note=note)
        )
    return lines

"""Numbers over the whole library of faults."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.detection.measure import Measured

REPORT = Path(".reports/detection.json")


def summary(measured: Sequence[Measured]) -> dict[str, Any]:
    """Faults found of all; median and 90th percentile of cases to find and seconds to minimal."""
    cases = [find.num_cases for one in measured for find in one.finds if find.found]
    seconds = [one.minimal.seconds for one in measured if one.minimal is not None]
    return {
        "faults": len(measured),
        "found": sum(one.found for one in measured),
        "missed": [one.fault.name for one in measured if not one.found],
        "cases_to_find": _spread(cases),
        "seconds_to_minimal": _spread(seconds),
    }


def write(measured: Sequence[Measured], path: Path = REPORT) -> None:
    """Write the report, folders included; faults in the order of their names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ordered = sorted(measured, key=lambda one: one.fault.name)
    report = {"summary": summary(measured), "faults": [one.to_plain() for one in ordered]}
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def percentile(values: Sequence[float], fraction: float) -> float:
    """The smallest of the values that is not below `fraction` of them."""
    ordered = sorted(values)
    return ordered[max(0, -(-round(fraction * 1000) * len(ordered) // 1000) - 1)]


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    """The values at half and nine tenths of their order, and the largest."""
    if not values:
        return None
    return {
        "median": round(statistics.median(values), 3),
        "p90": round(percentile(values, 0.9), 3),
        "max": round(max(values), 3),
    }

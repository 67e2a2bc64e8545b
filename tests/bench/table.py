"""The lines of the bench and how they are shown: one table, one JSON file, the same numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

REPORT = Path(".reports/bench.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One number: `part` of the bench it belongs to, what it is, its unit.

    `target` is what it should be, as text, empty where nothing is promised; it is shown and never
    asserted. `value` None: not measured, `note` says why.
    """

    part: str
    name: str
    value: float | None
    unit: str
    target: str = ""
    note: str = ""


def table(lines: Sequence[Line]) -> list[str]:
    """The lines in columns, the first of them the names of the columns."""
    rows = [("part", "what", "value", "target", "note")]
    rows += [
        (line.part, line.name, _with_unit(line.value, line.unit), line.target, line.note)
        for line in lines
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def write(lines: Sequence[Line], path: Path = REPORT) -> None:
    """Write the lines as a JSON list, folders included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(line) for line in lines], indent=2) + "\n", encoding="utf-8")


def shown(value: float) -> str:
    """Three significant digits, without an exponent where that is short."""
    if value != 0.0 and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.2e}"
    digits = f"{value:.3g}"
    return f"{value:.0f}" if "e" in digits else digits


def _with_unit(value: float | None, unit: str) -> str:
    return "not measured" if value is None else f"{shown(value)} {unit}".rstrip()

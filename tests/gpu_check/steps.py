"""One step: a command in a process of its own, the exit code it must have, and what it says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from properties.repro import PROJECT

MAX_SEEN = 200
"""Characters of a line that are shown; all of it is in the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """`name` is also the step's folder, which the command runs in; its output is `log` there."""

    name: str
    command: tuple[str, ...]
    wanted: int = 0
    says: Callable[[Path], str] = lambda folder: last_line(folder)
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a step ended; `code` None: it was not over in time, or did not begin."""

    name: str
    ok: bool
    seen: str
    seconds: float


def run(step: Step, root: Path, *, seconds_left: float) -> Outcome:
    """Run a step; whatever it started is ended with it when the time is over."""
    if seconds_left <= 0:
        return Outcome(name=step.name, ok=False, seen="not begun: no time left", seconds=0.0)
    folder = root / step.name
    folder.mkdir(parents=True, exist_ok=True)
    search_path = os.pathsep.join(filter(None, (str(PROJECT), os.environ.get("PYTHONPATH"))))
    began = time.monotonic()
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            step.command,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": search_path, "CI": "1", **step.environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(timeout=seconds_left)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    seconds = time.monotonic() - began
    if code is None:
        return Outcome(name=step.name, ok=False, seen="not over in time", seconds=seconds)
    said = step.says(folder)
    ok = code == step.wanted
    seen = said if ok else f"exit code {code} instead of {step.wanted}: {said}"
    return Outcome(name=step.name, ok=ok, seen=seen, seconds=seconds)


def last_line(folder: Path) -> str:
    """The last that was printed."""
    text = (folder / "log").read_text(encoding="utf-8", errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:MAX_SEEN] if lines else "nothing was printed"


def judged(folder: Path) -> str:
    """The counts of a session's report."""
    path = folder / "report.json"
    if not path.exists():
        return last_line(folder)
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    entries = report["properties"]
    counts = {
        kind: sum(entry[kind] for entry in entries) for kind in ("judged", "failed", "inconclusive")
    }
    told = [f"{count} {kind}" for kind, count in counts.items()]
    widened = sum(sum(entry["notes"].values()) for entry in entries)
    margins = [e["worst_margin"] for e in entries if e["worst_margin"] is not None]
    told += [f"worst margin {max(margins):.4g}"] if margins else []
    told += [f"{widened} bounds widened"] if widened else []
    told += [f"not replayed in {dtype}" for dtype in report["unreplayable"]]
    return ", ".join(told)


def table(outcomes: list[Outcome]) -> list[str]:
    """The outcomes in columns, the names of the columns first."""
    rows = [("step", "", "seconds", "what was seen")]
    rows += [
        (one.name, "ok" if one.ok else "FAILED", f"{one.seconds:.0f}", one.seen) for one in outcomes
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]])
        for row in rows
    ]

"""Run every installed engine over the suites and write one page: `make conformance`.

An engine `NAME` that has an environment of its own, `.venv-NAME`, is run with that one's Python.
One that cannot be loaded is listed with the reason. Exits 0 where no engine that ran has a failure
or an inconclusive case.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fsdp_engine.contract.protocol import DEVICES
from fsdp_engine.world.registry import registered
from properties.catalog import descriptions
from properties.conformance.page import page
from properties.conformance.runs import EngineRun, to_json
from properties.profiles import PROFILES
from properties.repro import PROJECT

_ENDED_WELL = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
_SHOWN_LINES = 3


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m properties.conformance", description=__doc__)
    parser.add_argument(
        "--engines",
        nargs="+",
        default=list(registered()),
        metavar="NAME",
        help="registered names or package.module:Class; default: all registered ones",
    )
    parser.add_argument("--profile", choices=PROFILES, default="default")
    parser.add_argument("--device", choices=DEVICES, default=DEVICES[0])
    parser.add_argument("--out", type=Path, default=Path(".reports/conformance"))
    parser.add_argument("pytest", nargs="*", help="behind --: handed to pytest")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    runs = []
    for name in options.engines:
        sys.stdout.write(f"{name}: ")
        sys.stdout.flush()
        run = run_engine(
            name,
            folder=options.out,
            arguments=["--profile", options.profile, "--device", options.device, *options.pytest],
        )
        runs.append(run)
        sys.stdout.write(f"{_in_words(run)}\n")
    (options.out / "report.json").write_text(to_json(runs), encoding="utf-8")
    html = options.out / "report.html"
    html.write_text(page(runs, descriptions()), encoding="utf-8")
    sys.stdout.write(f"{html}\n")
    return int(any(run.report is not None and run.exit_code != 0 for run in runs))


def run_engine(name: str, *, folder: Path, arguments: list[str]) -> EngineRun:
    """One session in a process of its own; its output goes to a file beside the page."""
    stem = name.replace(":", ".")
    report, log = folder / f"{stem}.json", folder / f"{stem}.log"
    report.unlink(missing_ok=True)
    command = [
        *(python_of(name), "-m", "pytest", str(PROJECT / "properties"), "-n", "auto"),
        *("--engine", name, "--report-json", str(report), *arguments),
    ]
    environment: Mapping[str, str] = {"OMP_NUM_THREADS": "1"} | os.environ
    with log.open("wb") as output:
        ended = subprocess.run(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, check=False
        )
    return read_run(name, report, log, exit_code=ended.returncode)


def python_of(engine: str) -> str:
    """The Python of the engine's own environment, where there is one; else this one."""
    own = PROJECT / f".venv-{engine}" / "bin" / "python"
    return str(own) if own.exists() else sys.executable


def read_run(name: str, report: Path, log: Path, *, exit_code: int) -> EngineRun:
    """What the session left: its report, or the last that it said."""
    written = report.read_text(encoding="utf-8") if report.exists() else ""
    content: dict[str, Any] | None = json.loads(written) if written else None
    if content is not None and exit_code in _ENDED_WELL:
        return EngineRun(engine=name, report=content, exit_code=exit_code)
    said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in said if line.startswith("ERROR: ")] or said[-_SHOWN_LINES:]
    reason = f"the session ended with code {exit_code}: {' '.join(errors)}"
    if exit_code == pytest.ExitCode.USAGE_ERROR:
        reason, content = " ".join(line.removeprefix("ERROR: ") for line in errors), None
    return EngineRun(engine=name, report=content, reason=reason, exit_code=exit_code)


def _in_words(run: EngineRun) -> str:
    counted = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in run.kinds.items())
    return "; ".join(filter(None, (counted, run.reason)))


if __name__ == "__main__":
    sys.exit(main())

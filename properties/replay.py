"""Run case files again: `python -m properties.replay CASE.json [CASE2.json | FOLDER ...]`.

Prints FIXED, FAILED or ERROR for each and exits 0, 1 or 2, the worst of them. A file that cannot be
read or run is an ERROR; the rest goes on. With `--prune` the files of what is fixed are removed:
the case, and the script beside it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

from fsdp_engine.contract.case import Case
from fsdp_engine.contract.errors import (
    CaseError,
    EngineLoadError,
    FsdpPropertiesError,
    UnsupportedCase,
)
from fsdp_engine.contract.protocol import DEVICES
from fsdp_engine.world.pool import WorldPool
from oracles.verdict import Verdict
from properties.catalog import PROPERTIES, load_check
from properties.outcome import ending_of
from properties.probe import ProbedRun, probe
from properties.repro import read_case_file, read_text, remove_repro

Status: TypeAlias = Literal["FIXED", "FAILED", "ERROR"]

EXIT_CODES: dict[Status, int] = {"FIXED": 0, "FAILED": 1, "ERROR": 2}
CASE_TIMEOUT_S = 60.0
DEFAULT_ENGINE = "reference"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What became of a case, and why in one line."""

    status: Status
    reason: str


def replay(case: Case, *, property_id: str, engine: str, device: str = "cpu") -> Replayed:
    """Judge the case once in a fresh world; what fails, only by what the probe confirms."""
    try:
        check = load_check(property_id)
        with WorldPool(engine, case_timeout_s=CASE_TIMEOUT_S, device=device) as pool:
            verdict = ending_of(check, case, pool.fresh).verdict
            if verdict.outcome == "fail" and (unreplayable := probe(device)):
                probed = ProbedRun(pool.fresh, unreplayable)
                verdict = ending_of(check, case, probed).verdict
            return _replayed(verdict)
    except UnsupportedCase as error:
        return Replayed(status="ERROR", reason=f"not applicable: {error}")
    except EngineLoadError as error:
        return Replayed(status="ERROR", reason=f"engine: {_one_line(error)}")
    except FsdpPropertiesError as error:
        return Replayed(status="ERROR", reason=_one_line(error))
    except Exception as error:  # noqa: BLE001  whatever a check raises, the case is not judged
        reason = f"the check raised {type(error).__name__}: {_one_line(error)}"
        return Replayed(status="ERROR", reason=reason)


def replay_text(text: str, *, property_id: str, engine: str, device: str = "cpu") -> int:
    """Judge the case in `text`, print one line, and return the exit code. For repro scripts."""
    replayed = _replay_text(text, property_id=property_id, engine=engine, device=device)
    return _print_replayed("case", replayed)


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m properties.replay", description=__doc__)
    parser.add_argument("paths", nargs="+", type=Path, metavar="CASE.json|FOLDER")
    parser.add_argument("--engine", default=os.environ.get("ENGINE", DEFAULT_ENGINE))
    parser.add_argument("--device", choices=DEVICES, default=os.environ.get("DEVICE", DEVICES[0]))
    parser.add_argument("--property", default="", help="judge by this one, not the file's own")
    parser.add_argument("--prune", action="store_true", help="remove the cases that are fixed")
    options = parser.parse_args(arguments)
    worst = 0
    for path in _files(options.paths):
        try:
            text = read_text(path)
        except (OSError, UnicodeDecodeError, CaseError) as error:
            replayed = Replayed(status="ERROR", reason=_one_line(error))
        else:
            replayed = _replay_text(
                text, property_id=options.property, engine=options.engine, device=options.device
            )
        if options.prune and replayed.status == "FIXED":
            remove_repro(path)
            replayed = replace(replayed, reason=f"{replayed.reason}; removed")
        worst = max(worst, _print_replayed(str(path), replayed))
    return worst


def _replay_text(text: str, *, property_id: str, engine: str, device: str) -> Replayed:
    """`property_id` empty: the one the file names."""
    try:
        read = read_case_file(text)
    except CaseError as error:
        return Replayed(status="ERROR", reason=_one_line(error))
    chosen = property_id or read.property
    if not chosen:
        return Replayed(status="ERROR", reason="property: the file names none; give --property")
    if chosen not in PROPERTIES and not property_id:
        # A path is code to import, and a case file is data.
        legal = ", ".join(sorted(PROPERTIES))
        reason = f"property: {chosen!a} is unknown; legal are {legal}, or another by --property"
        return Replayed(status="ERROR", reason=reason)
    return replay(read.case, property_id=chosen, engine=engine, device=device)


def _replayed(verdict: Verdict) -> Replayed:
    match verdict.outcome:
        case "pass":
            return Replayed(status="FIXED", reason="the property holds")
        case "fail":
            first = str(verdict.mismatches[0])
            more = len(verdict.mismatches) - 1
            return Replayed(
                status="FAILED",
                reason=first.replace("\n", " ") + (f" ... and {more} more" if more else ""),
            )
        case "inconclusive" | "not_applicable":
            reason = f"{verdict.outcome.replace('_', ' ')}: {verdict.reason}"
            return Replayed(status="ERROR", reason=reason.replace("\n", " "))


def _print_replayed(name: str, replayed: Replayed) -> int:
    sys.stdout.write(f"{replayed.status} {name}: {replayed.reason}\n")
    sys.stdout.flush()
    return EXIT_CODES[replayed.status]


def _files(paths: list[Path]) -> Iterator[Path]:
    """The files named, and the case files in the folders named; an empty folder is a bad file."""
    for path in paths:
        found = sorted(path.glob("*.json")) if path.is_dir() else []
        yield from found or [path]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


if __name__ == "__main__":
    sys.exit(main())

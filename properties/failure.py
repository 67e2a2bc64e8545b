"""A failing case written down for the report: what was wrong, and what every rank did.

Plain data, so that it travels from a worker to its controller and into the report file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fsdp_engine.contract.case import Case
from fsdp_engine.contract.case_file import case_id
from fsdp_engine.contract.observation import Collective, Observation, RankObservation

MAX_COLLECTIVES = 200
"""As many of a rank are written down; behind them stands how many there were."""


def described(
    case: Case, path: Path, *, outcome: str, message: str, shown: Observation | None
) -> dict[str, Any]:
    """The failure with its mesh, message, files, command and the collectives of every rank.

    `path` is the case file, with the script beside it; the command is the message's last line.
    Where the ranks showed nothing (an exception, a hang) there are no collectives.
    """
    script = path.with_suffix(".py")
    return {
        "case_id": case_id(case),
        "mesh": list(case.mesh.shape),
        "outcome": outcome,
        "message": message,
        "command": message.rpartition("\n")[2],
        "case_file": str(path),
        "script": str(script),
        "script_text": script.read_text(encoding="utf-8"),
        "timeline": [] if shown is None else [_timeline(case, rank) for rank in shown.ranks],
    }


def _timeline(case: Case, rank: RankObservation) -> list[dict[str, Any]]:
    entries = list(_entries(case, rank))
    kept = entries[:MAX_COLLECTIVES]
    if len(entries) > len(kept):
        kept.append({"at": "", "what": f"and {len(entries) - len(kept)} more", "operation": ""})
    return kept


def _entries(case: Case, rank: RankObservation) -> Iterator[dict[str, Any]]:
    for collective in rank.build_collectives:
        yield _entry("build", collective)
    for number, (action, record) in enumerate(zip(case.program, rank.records, strict=True)):
        for collective in record.collectives:
            yield _entry(f"action {number} ({action.kind})", collective)


def _entry(action: str, collective: Collective) -> dict[str, Any]:
    place = [action] if collective.phase == "build" else [action, collective.phase]
    if collective.micro_batch >= 0:
        place.append(f"micro-batch {collective.micro_batch}")
    how = f" {collective.reduce_op}" if collective.reduce_op else ""
    what = (
        f"{collective.operation.replace('_', '-')}{how}, {collective.axis} of "
        f"{collective.group_size}, {collective.elements} {collective.dtype}"
    )
    return {"at": ", ".join(place), "what": what, "operation": collective.operation}

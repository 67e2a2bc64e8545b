"""How close to its limit every property came, night after night: a file of records and a page.

Each session adds one line of JSON to the file, a few kilobytes, which is kept beside the database
of failures. The page is one file without scripts: for every engine and device a row for each
property, its worst margins as a small picture.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

from properties.catalog import descriptions
from properties.conformance.markup import MARKS, TITLES, cases, opening, text
from properties.conformance.runs import Kind, is_finite
from properties.report import Report

Night: TypeAlias = Mapping[str, Any]

MAX_NIGHTS = 400
"""Older records are dropped."""

_WIDTH, _HEIGHT, _EDGE = 180, 34, 4
_TOP = 1.25
"""The margin at the upper edge; what is beyond it is drawn there."""


def night(report: Report) -> Night:
    """What is kept of a session: by property its verdict, cases, worst margin and of what kind."""
    told = json.loads(report.to_json())
    kept = ("engine", "device", "profile", "seed", "wall_seconds", "versions")
    keys = ("verdict", "judged", "worst_margin", "margin_kind")
    return {
        "at": datetime.now(UTC).isoformat(timespec="minutes"),
        **{key: told[key] for key in kept},
        "properties": {entry["id"]: [entry[key] for key in keys] for entry in told["properties"]},
    }


def add(path: Path, latest: Night) -> list[Night]:
    """Write a session's record behind the others, and return all of them, the oldest first."""
    nights = [*read(path), latest][-MAX_NIGHTS:]
    lines = "".join(json.dumps(one, allow_nan=False) + "\n" for one in nights)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(lines, encoding="utf-8")
    fresh.replace(path)  # a session that is ended meanwhile leaves the old file
    return nights


def read(path: Path) -> list[Night]:
    """The records of a file, none where there is no file; lines that are none are left out."""
    if not path.exists():
        return []
    found: list[Night] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            one = json.loads(line)
        except ValueError:
            continue
        if isinstance(one, dict) and isinstance(one.get("properties"), dict):
            found.append(one)
    return found


def page(nights: Sequence[Night]) -> str:
    """The page as text: properties in the order of the catalog, those of others behind them."""
    said = descriptions()
    groups: dict[tuple[str, str], list[Night]] = {}
    for one in nights:
        groups.setdefault((str(one["engine"]), str(one["device"])), []).append(one)
    sections = [_section(*key, group, said) for key, group in groups.items()]
    return (
        f"{opening('Margins over the nights')}"
        "<p>The worst error over the allowed one in each session, the oldest on the left. At most "
        "1, the dashed line, passes; what lies on the ground has no error at all.</p></header>"
        f"<main>{''.join(sections)}</main></body></html>\n"
    )


def _section(engine: str, device: str, nights: Sequence[Night], said: Mapping[str, str]) -> str:
    latest = nights[-1]
    names = [*said, *sorted(latest["properties"].keys() - said.keys())]
    shown = [name for name in names if any(name in one["properties"] for one in nights)]
    rows = "".join(_row(name, nights, said.get(name, "")) for name in shown)
    judged = sum(entry[1] for one in nights for entry in one["properties"].values())
    return (
        f"<section><h2>{text(engine)} on {text(device)}</h2>"
        f'<p class="soft small">{len(nights)} sessions from {text(nights[0]["at"])} to '
        f"{text(latest['at'])}, {cases(judged)} judged; the last one: profile "
        f"{text(latest['profile'])}, seed {text(latest['seed'])}, "
        f"{round(latest['wall_seconds'])} s, torch {text(latest['versions'].get('torch', ''))}</p>"
        '<table class="nights"><thead><tr><th scope="col">property</th>'
        '<th scope="col">worst margin, night by night</th><th scope="col">last</th>'
        '<th scope="col">worst</th><th scope="col">last verdict</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></section>"
    )


def _row(name: str, nights: Sequence[Night], description: str) -> str:
    entries = [one["properties"].get(name) for one in nights]
    margins = [None if entry is None else entry[2] for entry in entries]
    known = [margin for margin in margins if margin is not None]
    last = next((entry for entry in reversed(entries) if entry is not None), None)
    assert last is not None
    kind: Kind = last[0]
    return (
        f'<tr><th scope="row"><b>{text(name)}</b><span>{text(description)}</span></th>'
        f"<td>{_picture(name, entries)}</td>"
        f"<td>{_number(last[2])}</td><td>{_number(max(known, default=None))}</td>"
        f'<td><span class="mark {kind}" aria-hidden="true">{MARKS[kind]}</span> '
        f"{text(TITLES[kind])}</td></tr>"
    )


def _number(margin: float | None) -> str:
    if margin is None:
        return "-"
    return f"{margin:.4g}" if is_finite(margin) else "not finite"


def _picture(name: str, entries: Sequence[Sequence[Any] | None]) -> str:
    """A line through the margins, a dot where a session failed or has no verdict, and the last."""
    points = [
        (_x(place, len(entries)), _y(entry[2]), entry[0])
        for place, entry in enumerate(entries)
        if entry is not None and entry[2] is not None
    ]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)
    dots = "".join(
        f'<circle class="{verdict}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>'
        for x, y, verdict in points
        if verdict in ("fail", "inconclusive") or x == points[-1][0]
    )
    limit = _y(1.0)
    known = [entry[2] for entry in entries if entry is not None and entry[2] is not None]
    told = f"{name}: {', '.join(map(_number, known[-12:])) or 'nothing was measured'}"
    return (
        f'<svg role="img" width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}">'
        f"<title>{text(told)}</title>"
        f'<path class="limit" d="M0 {limit:.1f}H{_WIDTH}"/>'
        f'<polyline class="line" points="{line}"/>{dots}</svg>'
    )


def _x(place: int, count: int) -> float:
    return _WIDTH - _EDGE - (count - 1 - place) * (_WIDTH - 2 * _EDGE) / max(1, count - 1)


def _y(margin: float) -> float:
    return _HEIGHT - _EDGE - min(margin, _TOP) / _TOP * (_HEIGHT - 2 * _EDGE)

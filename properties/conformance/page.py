"""One page of all engines' sessions: engines across, properties down. No scripts, no other files.

A cell opens what is behind it in place (the browser's own popovers). Everything that comes from a
session is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from properties.conformance.details import cell_details
from properties.conformance.markup import MARKS, TITLES, cases, link, opening, text
from properties.conformance.runs import KINDS, EngineRun, is_finite, kind_of

_SMALL, _LARGE = 0.001, 1e6


def page(runs: Sequence[EngineRun], descriptions: Mapping[str, str]) -> str:
    """The page as text. `descriptions` has a sentence for every property, in the page's order.

    Properties that only a session knows come behind those.
    """
    names = list(descriptions)
    names += sorted({name for run in runs for name in run.properties} - set(names))
    ran = [run for run in runs if run.report is not None]
    common = _common_versions(ran)
    parts = [
        _head(ran),
        '<main><section aria-labelledby="engines"><h2 id="engines">Engines</h2>',
        '<div class="engines">',
        *(_engine(run, common) for run in runs),
        '</div></section><section aria-labelledby="matrix"><h2 id="matrix">Properties</h2>',
        _matrix(ran, names, descriptions) if ran else "<p>No engine was run.</p>",
        '</section><section aria-labelledby="issues"><h2 id="issues">Known issues</h2>',
        _issues(ran),
        "</section></main>",
        _foot(ran, common),
    ]
    return "\n".join(parts) + "\n"


def _head(ran: Sequence[EngineRun]) -> str:
    reports = [run.report for run in ran if run.report is not None]
    judged = sum(entry["judged"] for run in ran for entry in run.properties.values())
    how = {(report["profile"], report["device"]) for report in reports}
    told = "; ".join(f"profile {profile}, device {device}" for profile, device in sorted(how))
    legend = "".join(
        f'<li><span class="mark {kind}" aria-hidden="true">{MARKS[kind]}</span>'
        f'<span>{TITLES[kind]}: <span class="soft">{text(meaning)}</span></span></li>'
        for kind, meaning in KINDS.items()
    )
    return (
        f"{opening('Conformance of FSDP training engines')}"
        "<p>Sharding must not change training. "
        f"{len(ran)} engines, {judged:,} cases judged on real ranks. "
        f'<span class="soft">{text(told)}</span></p>'
        f'<ul class="legend">{legend}</ul></header>'
    )


def _common_versions(ran: Sequence[EngineRun]) -> dict[str, str]:
    """What all sessions had the same: the page says it once."""
    versions = [run.report["versions"].items() for run in ran if run.report is not None]
    return dict(set.intersection(*map(set, versions))) if versions else {}


def _engine(run: EngineRun, common: Mapping[str, str]) -> str:
    counts = "".join(
        f'<li class="{kind}"><span aria-hidden="true">{MARKS[kind]}</span> '
        f"{run.kinds[kind]} {TITLES[kind]}</li>"
        for kind in KINDS
        if run.kinds[kind]
    )
    lines = [f"<h3>{text(run.engine)}</h3>"]
    if run.report is None:
        lines.append('<p class="small"><b>Not run.</b></p>')
    else:
        versions = run.report["versions"].items()
        own = [f"{name} {number}" for name, number in sorted(versions) if name not in common]
        told = ", ".join([*own, f"{round(run.report['wall_seconds'])} s"])
        lines.append(f'<p class="soft small">{text(told)}</p>')
        lines.append(f'<ul class="counts">{counts}</ul>')
        lacks = _lacks(run.report["lacks"])
        if lacks:
            lines.append(f'<p class="soft small">Drawn without {text(lacks)}</p>')
    if run.reason:
        lines.append(f'<p class="small">{text(run.reason)}</p>')
    return f'<article class="engine">{"".join(lines)}</article>'


def _lacks(lacks: Sequence[Mapping[str, str]]) -> str:
    """What an engine lacks, the values of one axis together."""
    told: dict[str, list[str]] = {}
    for lack in lacks:
        *others, (axis, value) = lack.items()
        under = "".join(f"{other} {one}: " for other, one in others)
        told.setdefault(f"{under}{axis}", []).append(value)
    return "; ".join(f"{where} {', '.join(values)}" for where, values in told.items())


def _matrix(ran: Sequence[EngineRun], names: Iterable[str], descriptions: Mapping[str, str]) -> str:
    heads = "".join(f'<th scope="col">{text(run.engine)}</th>' for run in ran)
    rows, behind = [], []
    for row, name in enumerate(names):
        cells = "".join(_cell(run, name, f"d{row}-{at}") for at, run in enumerate(ran))
        behind += [cell_details(run, name, f"d{row}-{at}") for at, run in enumerate(ran)]
        said = descriptions.get(name, "")
        rows.append(
            f'<tr><th scope="row"><b>{text(name)}</b><span>{text(said)}</span></th>{cells}</tr>'
        )
    return (
        '<p class="soft" id="cells">A cell has the number of judged cases and the worst error over '
        "the allowed one: at most 1 passes, <i>exact</i> allows none. It opens what is behind it."
        '</p><table class="matrix" aria-describedby="cells">'
        f'<thead><tr><th scope="col">property</th>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>{''.join(behind)}"
    )


def _cell(run: EngineRun, name: str, anchor: str) -> str:
    entry = run.properties.get(name)
    kind = kind_of(entry)
    judged = 0 if entry is None else entry["judged"]
    shown = "" if entry is None else _margin(entry["worst_margin"], entry["margin_kind"])
    spoken = f"{run.engine}, {name}: {TITLES[kind]}, {cases(judged)} judged"
    count = str(judged) if judged else ""
    known = 0 if entry is None else sum(entry["known_issue"].values())
    below = " · ".join(filter(None, (f"{known} known" if known else "", shown)))
    return (
        f'<td><button type="button" class="cell {kind}" popovertarget="{anchor}" '
        f'aria-label="{text(spoken)}"><span class="who">{text(run.engine)}</span>'
        f'<b><span aria-hidden="true">{MARKS[kind]}</span> {count}</b>'
        f"<small>{text(below)}</small></button></td>"
    )


def _margin(margin: float | None, kind: str) -> str:
    if margin is None:
        return ""
    if kind == "exact" and margin == 0:
        return "exact"
    if not is_finite(margin):
        return "not finite"
    if margin < _SMALL:
        return f"< {_SMALL}"
    return f"{margin:.2g}" if margin < 100 else f"{margin:,.0f}" if margin < _LARGE else "huge"


def _issues(ran: Sequence[EngineRun]) -> str:
    """One row for every issue, those that were met first."""
    entries: dict[str, dict[str, dict[str, Any]]] = {}
    for run in ran:
        assert run.report is not None
        for issue in run.report["known_issues"]:
            entries.setdefault(issue["id"], {})[run.engine] = issue
    if not entries:
        return "<p>None of these engines has any.</p>"
    ordered = sorted(entries.values(), key=lambda found: not any(map(_was_met, found.values())))
    return (
        '<table class="issues"><thead><tr><th scope="col">what</th>'
        '<th scope="col">where it shows</th></tr></thead>'
        f"<tbody>{''.join(map(_issue, ordered))}</tbody></table>"
    )


def _was_met(issue: Mapping[str, Any]) -> bool:
    return bool(issue["cases"] or issue["fixed"])


def _issue(found: Mapping[str, Mapping[str, Any]]) -> str:
    issue = next(iter(found.values()))
    lines = []
    for engine, own in found.items():
        by = ", ".join(f"{name} {count}" for name, count in own["found_by"].items())
        told = f"{cases(own['cases'])} ({by})" if own["cases"] else "not met"
        gone = "; <b>no longer shows</b>" if own["fixed"] else ""
        soft = "" if _was_met(own) else ' class="soft"'
        lines.append(f"<li{soft}><b>{text(engine)}</b>: {text(told)}{gone}</li>")
    return (
        f"<tr><td>{text(issue['reason'])}.<br>"
        f'<span class="small">{link(issue["reference"], issue["id"])}</span></td>'
        f'<td><ul class="where">{"".join(lines)}</ul></td></tr>'
    )


def _foot(ran: Sequence[EngineRun], common: Mapping[str, str]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in sorted(common.items()))
    seeds = ", ".join(f"{run.engine} {run.report['seed']}" for run in ran if run.report is not None)
    return (
        f'<footer class="soft small"><p>All with {text(versions) or "versions of their own"}.</p>'
        f"<p>Seeds: {text(seeds)}. "
        "To repeat a session: <code>pytest properties/ --engine NAME --hypothesis-seed SEED"
        "</code>.</p></footer></body></html>"
    )

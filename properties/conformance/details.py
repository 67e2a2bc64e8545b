"""What opens behind a cell: counts, reasons, known issues, and every failing case in full."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from properties.conformance.markup import TITLES, cases, link, text
from properties.conformance.runs import KINDS, EngineRun, is_finite, kind_of


def cell_details(run: EngineRun, name: str, anchor: str) -> str:
    """The popover of one property of one engine."""
    entry = run.properties.get(name)
    kind = kind_of(entry)
    meaning = KINDS[kind]
    body = [f"<p>{text(meaning[0].upper() + meaning[1:])}.</p>"]
    if entry is not None:
        body += [_counts(entry), _reasons(entry["not_applicable"]), _known(run, entry)]
        body += [_failure(failure) for failure in entry["failures"]]
    return (
        f'<div popover id="{anchor}" role="dialog" aria-labelledby="{anchor}t">'
        f'<div class="sheet-head"><h2 id="{anchor}t">{text(run.engine)}: {text(name)} '
        f'<span class="mark {kind}">&nbsp;{TITLES[kind]}&nbsp;</span></h2>'
        f'<button type="button" class="close" popovertarget="{anchor}" '
        'popovertargetaction="hide">Close</button></div>'
        f'<div class="sheet-body">{"".join(body)}</div></div>'
    )


def _counts(entry: dict[str, Any]) -> str:
    known = sum(entry["known_issue"].values())
    counts = {
        "passed": entry["judged"] - entry["failed"] - known,
        "known issue": known,
        "failed": entry["failed"],
        "inconclusive": entry["inconclusive"],
        "not applicable": sum(entry["not_applicable"].values()),
    }
    sentence = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    worlds = entry["cases_per_world_size"]
    ranks = ", ".join(f"{count} on {size} ranks" for size, count in worlds.items())
    lines = [f"<p>{cases(entry['drawn'])} drawn: {sentence}.</p>"]
    if ranks:
        lines.append(f'<p class="soft small">{text(ranks)}; {entry["seconds"]} s</p>')
    if entry["worst_margin"] is not None:
        margin = entry["worst_margin"]
        shown = f"{margin:.4g}" if is_finite(margin) else "not finite"
        lines.append(
            f"<p>Worst error over the allowed one: <b>{shown}</b> ({text(entry['margin_kind'])}). "
            '<span class="soft">At most 1 passes.</span></p>'
        )
    return "".join(lines)


def _reasons(reasons: Mapping[str, int]) -> str:
    if not reasons:
        return ""
    items = "".join(
        f"<li>{cases(count)}: {text(reason)}</li>"
        for reason, count in sorted(reasons.items(), key=lambda item: -item[1])
    )
    return f'<h3>Not applicable</h3><ul class="reasons">{items}</ul>'


def _known(run: EngineRun, entry: dict[str, Any]) -> str:
    assert run.report is not None
    issues = {issue["id"]: issue for issue in run.report["known_issues"]}
    items = "".join(
        f"<li>{cases(count)}: "
        f"{text(issues[name]['reason'])} ({link(issues[name]['reference'], name)})</li>"
        for name, count in entry["known_issue"].items()
    )
    items += "".join(
        f"<li>{link(issues[name]['reference'], name)} no longer shows ({count})</li>"
        for name, count in entry["fixed"].items()
    )
    return f'<h3>Known issues</h3><ul class="reasons">{items}</ul>' if items else ""


def _failure(failure: dict[str, Any]) -> str:
    message = failure["message"].rpartition("\n")[0] or failure["message"]
    return (
        f'<section class="failure"><h3>Case {text(failure["case_id"][:12])}: '
        f"{text(failure['outcome'])}</h3>"
        f"<p>Run it again: <code>{text(failure['command'])}</code></p>"
        f'<div class="picture">{mesh_picture(failure["mesh"])}</div>'
        f"<pre>{text(message)}</pre>"
        f"{timeline(failure['timeline'])}"
        f"<details><summary>Script: <code>{text(failure['script'])}</code></summary>"
        f'<pre class="script">{text(failure["script_text"])}</pre></details></section>'
    )


def mesh_picture(shape: Sequence[int]) -> str:
    """The ranks as they lie on the mesh: replicas down, shards across."""
    replicas, shards = (1, *shape)[-2:]
    heads = "".join(f'<th scope="col">shard {shard}</th>' for shard in range(shards))
    rows = []
    for replica in range(replicas):
        ranks = "".join(f"<td>rank {replica * shards + shard}</td>" for shard in range(shards))
        head = f'<th scope="row">replica {replica}</th>' if len(shape) == 2 else "<th></th>"
        rows.append(f"<tr>{head}{ranks}</tr>")
    told = " by ".join(map(str, shape))
    axes = "replicate, shard" if len(shape) == 2 else "shard"
    return (
        f'<figure><figcaption>mesh {told} ({axes})</figcaption><div class="scroll">'
        f'<table class="mesh"><thead><tr><th></th>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div></figure>"
    )


def timeline(ranks: Sequence[Sequence[dict[str, Any]]]) -> str:
    """What every rank issued, in its order; one cell where all did the same at the same place."""
    if not ranks:
        return (
            '<p class="soft">The ranks showed no collectives: the run did not come to its end.</p>'
        )
    length = max(map(len, ranks))
    rows = []
    for number in range(length):
        entries = [rank[number] if number < len(rank) else None for rank in ranks]
        rows.append(_moment(number, entries))
    heads = "".join(f'<th scope="col">rank {rank}</th>' for rank in range(len(ranks)))
    return (
        "<details open><summary>Collectives of every rank, in order</summary>"
        '<div class="scroll"><table class="timeline"><thead><tr><th scope="col">#</th>'
        f'<th scope="col">where</th>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
        "</div></details>"
    )


def _moment(number: int, entries: Sequence[dict[str, Any] | None]) -> str:
    first = next(entry for entry in entries if entry is not None)
    places = {entry["at"] for entry in entries if entry is not None}
    where = text(first["at"]) if len(places) == 1 else text(" / ".join(sorted(places)))
    if all(entry == first for entry in entries):
        cells = _issued(first, span=len(entries))
        return f"<tr><td>{number}</td><td>{where}</td>{cells}</tr>"
    cells = "".join(_issued(entry, span=1) for entry in entries)
    return (
        f'<tr class="parts"><td>{number} ≠</td><td>{where} <b>ranks part here</b></td>{cells}</tr>'
    )


def _issued(entry: dict[str, Any] | None, *, span: int) -> str:
    spanned = f' colspan="{span}"' if span > 1 else ""
    if entry is None:
        return f'<td class="op"{spanned}>nothing</td>'
    return f'<td class="op {text(entry["operation"])}"{spanned}>{text(entry["what"])}</td>'

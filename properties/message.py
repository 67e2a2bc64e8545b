"""The one message of a failure."""

from __future__ import annotations

from pathlib import Path

from fsdp_engine.contract.case import Case
from oracles.verdict import Mismatch, Verdict, failing
from properties.issues.issue import KnownIssue
from properties.repro import source_of

MAX_MISMATCHES = 5


def failure_message(
    case: Case,
    verdict: Verdict,
    *,
    name: str,
    engine: str,
    path: Path,
    device: str = "cpu",
    script: str = "",
) -> str:
    """The verdict, the worst of what is wrong, the case as source, its files, the command last."""
    shown = verdict.mismatches[:MAX_MISMATCHES]
    more = len(verdict.mismatches) - len(shown)
    lines = [f"{name}: {verdict.outcome} (engine {engine}, mesh {case.mesh.shape})"]
    lines += [verdict.reason] if verdict.reason else []
    lines += [f"  {mismatch}" for mismatch in shown]
    lines += [f"  ... and {more} more"] if more else []
    if verdict.margin is not None:
        lines.append(f"margin: {verdict.margin:.4g} ({verdict.margin_kind}; at most 1 passes)")
    lines += [
        f"@example(case={source_of(case)})",
        f"case file: {path}",
        *([script] if script else []),
        f"python -m properties.replay {path} --engine {engine}"
        + (f" --device {device}" if device != "cpu" else ""),
    ]
    return "\n".join(lines)


def gone(issue: KnownIssue) -> Verdict:
    """A known issue that no longer shows: strict, as an unexpected pass is."""
    got = f"the property holds for a case in which it must fail: {issue.reason}"
    wanted = f"a failure, or no such entry in properties/issues/ ({issue.reference})"
    return failing(
        Mismatch(where=f"known issue {issue.id} no longer shows", got=got, wanted=wanted)
    )


def told(verdict: Verdict) -> str:
    """A verdict in a line."""
    what = verdict.reason or "; ".join(map(str, verdict.mismatches[:MAX_MISMATCHES]))
    return f"{verdict.outcome} ({what})" if what else verdict.outcome

"""What a check says about a run. Failures are values; only `properties.judge` raises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Outcome: TypeAlias = Literal["pass", "fail", "inconclusive", "not_applicable"]
MarginKind: TypeAlias = Literal["exact", "rigorous", "calibrated"]


NOT_REPLAYABLE = (
    "local gradients cannot be replayed: the engine declares it, or the probe at the start of the "
    "session found it for the compute dtype"
)
"""Why a comparison with replay is not applicable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """One thing that is not as it should be.

    `where` names action, rank, parameter and element as far as they apply. `off` is the absolute
    error and `allowed` what is allowed, where both are numbers.
    """

    where: str
    got: str
    wanted: str
    off: float | None = None
    allowed: float | None = None

    def __str__(self) -> str:
        sentence = f"{self.where}: got {self.got}, should be {self.wanted}"
        if self.off is None or self.allowed is None:
            return sentence
        return f"{sentence} (off by {self.off:.3g}, allowed {self.allowed:.3g})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Pass, fail, inconclusive (a hang or a failing world) or not applicable, with the reason.

    `margin` is error / allowed error of the worst element over all comparisons: at most 1 passes.
    An exact comparison has margin 0 where it passes. `margin_kind` is the kind of the comparison
    that gave the margin. `reason` says why a verdict is inconclusive or not applicable, `notes`
    under which conditions it was judged.
    """

    outcome: Outcome
    mismatches: tuple[Mismatch, ...] = ()
    margin: float | None = None
    margin_kind: MarginKind = "exact"
    reason: str = ""
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return self.outcome == "pass"


def passing(
    *,
    margin: float | None = None,
    margin_kind: MarginKind = "exact",
    notes: tuple[str, ...] = (),
) -> Verdict:
    """Everything compared was as it should be."""
    return Verdict(outcome="pass", margin=margin, margin_kind=margin_kind, notes=notes)


def failing(
    *mismatches: Mismatch,
    margin: float | None = None,
    margin_kind: MarginKind = "exact",
    notes: tuple[str, ...] = (),
) -> Verdict:
    """Something is not as it should be; the worst first, those without a number on top."""

    def excess(mismatch: Mismatch) -> float:
        if mismatch.off is None or not mismatch.allowed:
            return float("inf")
        return mismatch.off / mismatch.allowed

    assert mismatches
    ordered = tuple(sorted(mismatches, key=excess, reverse=True))
    return Verdict(
        outcome="fail", mismatches=ordered, margin=margin, margin_kind=margin_kind, notes=notes
    )


def not_applicable(reason: str) -> Verdict:
    """The check has nothing to say about this case."""
    return Verdict(outcome="not_applicable", reason=reason)


def exactly(mismatches: list[Mismatch]) -> Verdict:
    """The verdict of comparisons that allow no error."""
    return failing(*mismatches) if mismatches else passing(margin=0.0)


def combine(*verdicts: Verdict) -> Verdict:
    """One verdict for several: fails if any fails, not applicable only if all are."""
    judged = [verdict for verdict in verdicts if verdict.outcome != "not_applicable"]
    if not judged:
        return verdicts[0]
    worst = max(judged, key=lambda verdict: -1.0 if verdict.margin is None else verdict.margin)
    margin, kind = worst.margin, worst.margin_kind
    mismatches = [mismatch for verdict in judged for mismatch in verdict.mismatches]
    notes = tuple(dict.fromkeys(note for verdict in judged for note in verdict.notes))
    if mismatches:
        return failing(*mismatches, margin=margin, margin_kind=kind, notes=notes)
    for verdict in judged:
        if verdict.outcome == "inconclusive":
            return verdict
    return passing(margin=margin, margin_kind=kind, notes=notes)

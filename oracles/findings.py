"""What a check has found so far: a verdict in the making."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from oracles.calibration import WIDENED, widened
from oracles.compare import Comparison
from oracles.verdict import MarginKind, Mismatch, Verdict, failing, passing


@dataclass(slots=True, kw_only=True)
class Findings:
    """Mismatches and the worst margin, as they come in.

    `widened`: a bound had to grow by how far a device's replays are apart; that is calibrated.
    """

    mismatches: list[Mismatch] = field(default_factory=list)
    margin: float = 0.0
    widened: bool = False

    def add(self, comparison: Comparison, *, spread: float = 0.0) -> None:
        """Add a comparison whose bound has this spread in it."""
        self.margin = max(self.margin, comparison.margin)
        self.widened |= spread > 0.0
        if comparison.mismatch is not None:
            wanted = comparison.mismatch.wanted + widened(spread)
            self.mismatches.append(replace(comparison.mismatch, wanted=wanted))

    def include(
        self, mismatches: Iterable[Mismatch], margin: float, *, widened: bool = False
    ) -> None:
        """Add what was found elsewhere."""
        self.mismatches += mismatches
        self.margin = max(self.margin, margin)
        self.widened |= widened

    def verdict(self, kind: MarginKind) -> Verdict:
        kind = "calibrated" if self.widened else kind
        notes = (WIDENED,) if self.widened else ()
        if self.mismatches:
            return failing(*self.mismatches, margin=self.margin, margin_kind=kind, notes=notes)
        return passing(margin=self.margin, margin_kind=kind, notes=notes)

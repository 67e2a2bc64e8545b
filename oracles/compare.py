"""Gradients against what they should be: every comparison names its worst element.

Non-finite values are judged first and apart. Where something is allowed, zeros of either sign are
the same number. Where nothing is allowed, values must be equal; the sign of a zero counts only if
the gradient is one local gradient handed through, without any sum (one rank, one reduction), since
the sign of a sum that vanishes depends on its order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from oracles.arrays import Float64, Mask, float64_of
from oracles.reduction import deviation, deviation_slack, magnitude, mean
from oracles.rounding import EVALUATION, Allowance, gamma
from oracles.verdict import Mismatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """At most one mismatch, the worst; `margin` is error / allowed of the worst element."""

    mismatch: Mismatch | None = None
    margin: float = 0.0


def compare_with_replay(
    got: Float64,
    terms: Float64,
    *,
    allowance: Allowance,
    world_size: int,
    where: str,
    spread: float = 0.0,
) -> Comparison:
    """The engine's gradient against the exact mean of the replayed local ones.

    `got` has the full shape, zeros where absent; `terms` is `[terms, *shape]`. `spread` is by how
    much the mean is not known where replay does not repeat itself.
    """
    strange = _non_finite(got, terms, allowance, world_size, where)
    if strange is not None:
        return Comparison(mismatch=strange, margin=np.inf)
    judged = np.isfinite(got) & np.isfinite(terms).all(0)
    safe_got = np.where(judged, got, 0.0)
    safe_terms = np.where(judged, terms, 0.0)
    sizes = magnitude(safe_terms, world_size)
    allowed = allowance.allowed(sizes, spread)
    slack = deviation_slack(safe_got, safe_terms, world_size)
    allowed = np.where(allowed > 0.0, allowed + slack, 0.0)
    off = np.abs(deviation(safe_got, safe_terms, world_size))
    wanted = mean(safe_terms, world_size)
    if len(terms) == world_size == 1 and not spread:
        off = np.where(np.signbit(safe_got) != np.signbit(safe_terms[0]), np.inf, off)
        allowed = allowance.allowed(sizes)
    return _judge(safe_got, wanted, off, allowed, where)


def compare_with_candidates(got: Float64, candidates: list[Tensor], *, where: str) -> Comparison:
    """The engine's gradient against every value that the declared levels can round to."""
    if not candidates:
        return Comparison()
    possible = np.stack([float64_of(candidate) for candidate in candidates])
    same = (possible == got) | (np.isnan(possible) & np.isnan(got))
    wrong = ~same.any(0)
    if not wrong.any():
        return Comparison()
    with np.errstate(invalid="ignore"):
        distance = np.nan_to_num(np.abs(possible - got), nan=np.inf)
    nearest = np.take_along_axis(possible, distance.argmin(0)[None], 0)[0]
    off = np.where(wrong, distance.min(0), 0.0)
    kind = f"one of {len(candidates)} sums in the declared dtypes" if len(candidates) > 1 else ""
    found = _judge(got, nearest, off, np.zeros_like(off), where).mismatch
    assert found is not None
    wanted = f"{found.wanted} ({kind or 'the sum in the declared dtypes'})"
    return Comparison(
        mismatch=Mismatch(
            where=found.where, got=found.got, wanted=wanted, off=found.off, allowed=0.0
        ),
        margin=np.inf,
    )


def compare_exact(got: Float64, wanted: Float64, elements: Mask, *, where: str) -> Comparison:
    """Equality of the certified elements with the truth."""
    safe_got, safe_wanted = np.where(elements, got, 0.0), np.where(elements, wanted, 0.0)
    off = np.nan_to_num(np.abs(safe_got - safe_wanted), nan=np.inf, posinf=np.inf)
    return _judge(got, wanted, off, np.zeros_like(off), where)


def compare_within(got: Float64, other: Float64, allowed: Float64, *, where: str) -> Comparison:
    """Two gradients that may differ by `allowed`; the subtraction itself rounds once."""
    same = (got == other) | (np.isnan(got) & np.isnan(other))
    with np.errstate(invalid="ignore"):
        difference = np.where(same, 0.0, np.abs(got - other))
    off = np.nan_to_num(difference, nan=np.inf, posinf=np.inf)
    return _judge(got, other, off, allowed * (1.0 + EVALUATION), where)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """One quantity as replay has it: `wide` in double, `narrow` in single.

    `scale` is the largest magnitude A among all quantities of its kind: all gradients' elements.
    """

    wide: Float64
    narrow: Float64
    scale: float


def compare_with_truth(
    reference: Reference, wanted: Float64, *, num_addends: int, elements: Mask, where: str
) -> Comparison:
    """Replay in double against the truth: the same function, evaluated twice in double.

    Certified `elements` must be equal. The others may differ by double's rounding errors, which
    are not bounded element by element: backward passes cancel. The same replay in single shows
    what rounding does to this tensor on this case, and to first order its errors are 2^29 times
    those of double (u = 2^-24 and 2^-53). Allowed is its largest error over the tensor: an
    allowance that only a difference of meaning exceeds. Single may be exact
    by coincidence, or a gradient vanish because larger ones cancel on the way back; then what is
    left is summing quantities of the model's scale: gamma(num_addends, u) max A over all
    gradients. Calibrated, not rigorous.
    """
    spread = np.abs(reference.narrow - reference.wide).max(initial=0.0)
    spread += gamma(num_addends, 2.0**-53) * reference.scale
    allowed = np.where(elements, 0.0, spread)
    return _judge(reference.wide, wanted, np.abs(reference.wide - wanted), allowed, where)


def _judge(got: Float64, wanted: Float64, off: Float64, allowed: Float64, where: str) -> Comparison:
    if off.size == 0:
        return Comparison()
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratio = np.where(off == 0.0, 0.0, off / allowed)
    ratio = np.nan_to_num(ratio, nan=np.inf, posinf=np.inf)
    margin = float(ratio.max())
    wrong = off > allowed
    if not wrong.any():
        return Comparison(margin=margin)
    # Among elements for which nothing is allowed the largest error is the worst.
    scores = np.where(wrong, np.where(np.isinf(ratio), off, 0.0), -1.0)
    flat = int(scores.argmax() if scores.max() > 0.0 else np.where(wrong, ratio, -1.0).argmax())
    index = [int(i) for i in np.unravel_index(flat, off.shape)]
    count = int(wrong.sum())
    note = f" (worst of {count} wrong elements)" if count > 1 else ""
    mismatch = Mismatch(
        where=f"{where}{index or ''}",
        got=f"{_at(got, flat)!r}{note}",
        wanted=repr(_at(wanted, flat)),
        off=_at(off, flat),
        allowed=_at(allowed, flat),
    )
    return Comparison(mismatch=mismatch, margin=margin)


def _at(values: Any, flat: int) -> float:
    return float(np.asarray(values).reshape(-1)[flat])


def _non_finite(
    got: Float64, terms: Float64, allowance: Allowance, world_size: int, where: str
) -> Mismatch | None:
    """NaN and infinities: they appear exactly where the local gradients have them.

    A sum of finite terms may overflow where W * A reaches a dtype's largest number. A NaN among
    the terms, or infinities of both signs, give NaN; infinities of one sign give that or NaN.
    """
    finite = np.isfinite(terms).all(0)
    sizes = magnitude(np.where(finite, terms, 0.0), world_size)
    may_overflow = finite & (sizes * world_size >= allowance.overflow)
    lost = finite & ~may_overflow & ~np.isfinite(got)
    must_be_nan = np.isnan(terms).any(0) | ((terms == np.inf).any(0) & (terms == -np.inf).any(0))
    sign = np.where((terms == np.inf).any(0), np.inf, -np.inf)
    kept = ~finite & ~np.isnan(got) & (must_be_nan | (got != sign))
    wrong = lost | kept
    if not wrong.any():
        return None
    flat = int(wrong.reshape(-1).argmax())
    index = [int(i) for i in np.unravel_index(flat, wrong.shape)]
    if lost.reshape(-1)[flat]:
        wanted = f"finite, {_at(mean(np.where(finite, terms, 0.0), world_size), flat)!r}"
    else:
        wanted = "nan" if must_be_nan.reshape(-1)[flat] else f"{_at(sign, flat)!r} or nan"
    return Mismatch(where=f"{where}{index or ''}", got=repr(_at(got, flat)), wanted=wanted)

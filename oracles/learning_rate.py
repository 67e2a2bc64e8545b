"""The learning rate by number of schedule steps, in closed form.

The formula is that of `Optimizer`. In the constant part the rate is `lr` itself, exactly. In the
warmup it is `lr * t / warmup_steps`, whose exact value is a fraction: a division and a product
round. A cosine is evaluated step by step in double, with a bound that runs along; `cos` is taken
to be within one unit in the last place, as in every libm in use, and does not stretch the error of
its argument.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from fsdp_engine.contract.case import Dtype, Optimizer
from oracles.rounding import FORMATS
from oracles.running_error import Bounded, add, divide, exact, multiply, rounded
from oracles.verdict import Mismatch

_DOUBLE: Dtype = "float64"


def learning_rate(options: Optimizer, steps: int) -> Bounded:
    """The rate after `steps` schedule steps, and how far off it may be computed."""
    if steps < options.warmup_steps:
        value = float(Fraction(options.lr) * steps / options.warmup_steps)
        return rounded(rounded(exact(value), _DOUBLE), _DOUBLE) if value else exact(0.0)
    if options.schedule == "constant":
        return exact(options.lr)
    return multiply(exact(options.lr), _cosine_factor(options, steps), _DOUBLE)


def rate_mismatches(
    where: str, got: Sequence[float | None], options: Optimizer, steps: int
) -> tuple[list[Mismatch], float]:
    """What the ranks say the rate after `steps` is, against the closed form, and the margin."""
    wanted = learning_rate(options, steps)
    value, allowed = float(wanted.value), float(wanted.error)
    mismatches, margin = [], 0.0
    for rank, rate in enumerate(got):
        place = f"{where}, rank {rank}"
        if rate is None or not math.isfinite(rate):
            mismatches.append(Mismatch(where=place, got=repr(rate), wanted=repr(value)))
            margin = math.inf
            continue
        off = abs(rate - value)
        if off:
            margin = max(margin, off / allowed if allowed else math.inf)
        if off > allowed:
            mismatches.append(
                Mismatch(where=place, got=repr(rate), wanted=repr(value), off=off, allowed=allowed)
            )
        elif rate != got[0]:
            wanted_here = f"{got[0]!r} as on rank 0"
            mismatches.append(Mismatch(where=place, got=repr(rate), wanted=wanted_here))
    return mismatches, margin


def _cosine_factor(options: Optimizer, steps: int) -> Bounded:
    low = exact(options.min_lr_ratio)
    one, half = exact(1.0), exact(0.5)
    length = max(1, options.total_steps - options.warmup_steps)
    progress = divide(exact(steps - options.warmup_steps), exact(length), _DOUBLE)
    angle = multiply(rounded(exact(math.pi), _DOUBLE), progress, _DOUBLE)
    # One unit in the last place is two roundings.
    wave = rounded(rounded(_cosine(angle), _DOUBLE), _DOUBLE)
    middle = multiply(add(one, low, _DOUBLE), half, _DOUBLE)
    swing = multiply(add(one, -low, _DOUBLE), half, _DOUBLE)
    factor = add(middle, multiply(swing, wave, _DOUBLE), _DOUBLE)
    if factor.value < options.min_lr_ratio:
        return Bounded(value=low.value, error=factor.error)
    return factor


def _cosine(angle: Bounded) -> Bounded:
    value = exact(math.cos(float(angle.value))).value
    return Bounded(value=value, error=angle.error + FORMATS[_DOUBLE].u)

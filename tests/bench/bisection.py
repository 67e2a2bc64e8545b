"""The smallest error that is found, among the powers of two of a value."""

from __future__ import annotations

from collections.abc import Callable

import torch

SMALLEST, LARGEST = -60, 6
"""Exponents of the relative errors that are tried: 2^-60 to 2^6."""


def smallest_found(
    found: Callable[[Callable[[float], float]], bool], value: float, dtype: torch.dtype
) -> float | None:
    """The smallest relative error 2^k of a `value` of `dtype` that is found, up and down.

    `found(change)` says whether the value is seen to be wrong when it is `change(value)`. An error
    that is found is taken to be found when it is larger. What counts is the error that is left
    after rounding to `dtype`; one that leaves the value as it is does not count as found. None:
    the largest is not found either.
    """

    def is_found(exponent: int) -> bool:
        steps = [_relative(sign, exponent) for sign in (1.0, -1.0)]
        values = [_rounded(step(value), dtype) for step in steps]
        return value not in values and all(found(step) for step in steps)

    if not is_found(LARGEST):
        return None
    exponent = first_true(is_found, SMALLEST, LARGEST)
    errors = [
        abs(_rounded(_relative(sign, exponent)(value), dtype) - value) / abs(value)
        for sign in (1.0, -1.0)
    ]
    return max(errors)


def first_true(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The smallest number from `low` on that `holds`, which `high` does, and all above one do."""
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return high


def _relative(sign: float, exponent: int) -> Callable[[float], float]:
    return lambda value: value * (1.0 + sign * 2.0**exponent)


def _rounded(value: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(value, dtype=torch.float64).to(dtype))

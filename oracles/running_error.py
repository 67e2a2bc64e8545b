"""Arithmetic with a bound on its error: every operation adds what its rounding may cost.

A running error analysis (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., 3.3). A
`Bounded` stands for a number that someone else computed in narrower formats: it is within `error`
of `value`. Values are evaluated here in double, whose own roundings are part of the bound, so the
bound holds for double formats as well; there it is about twice what would do with exact values.
From where a number may pass the largest of its format, nothing is known of it: the error is
infinite.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fsdp_engine.contract.case import Dtype
from oracles.arrays import Float64
from oracles.rounding import EVALUATION, FORMATS, holds

_DOUBLE = FORMATS["float64"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounded:
    """Numbers known to within `error`, elementwise."""

    value: Float64
    error: Float64

    def __neg__(self) -> Bounded:
        return Bounded(value=-self.value, error=self.error)

    def __getitem__(self, place: slice) -> Bounded:
        return Bounded(value=self.value[place], error=self.error[place])


def exact(value: npt.ArrayLike) -> Bounded:
    """A number that is known."""
    known = np.asarray(value, dtype=np.float64)
    return Bounded(value=known, error=np.zeros_like(known))


def rounded(number: Bounded, dtype: Dtype) -> Bounded:
    """The number after one rounding into a format."""
    return _rounded(number.value, number.error, dtype)


def stored(number: Bounded, dtype: Dtype, *, computed: Dtype) -> Bounded:
    """A number computed in one format, kept in another: a rounding where that is coarser."""
    return number if holds(dtype, computed) else rounded(number, dtype)


def add(one: Bounded, other: Bounded, dtype: Dtype) -> Bounded:
    """The sum, rounded into `dtype`."""
    with np.errstate(over="ignore", invalid="ignore"):
        return _rounded(one.value + other.value, one.error + other.error, dtype)


def multiply(one: Bounded, other: Bounded, dtype: Dtype) -> Bounded:
    """The product, rounded into `dtype`."""
    with np.errstate(over="ignore", invalid="ignore"):
        error = (
            np.abs(one.value) * other.error
            + np.abs(other.value) * one.error
            + one.error * other.error
        )
        return _rounded(one.value * other.value, error, dtype)


def divide(one: Bounded, other: Bounded, dtype: Dtype) -> Bounded:
    """The quotient, rounded into `dtype`; nothing is known where the divisor may be zero."""
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        quotient = one.value / other.value
        least = np.abs(other.value) * (1.0 - EVALUATION) - other.error
        error = (one.error + np.abs(quotient) * other.error) / least
        return _rounded(quotient, np.where(least > 0.0, error, np.inf), dtype)


def square_root(number: Bounded, dtype: Dtype) -> Bounded:
    """The root of a number that is not negative, rounded into `dtype`."""
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        value = np.maximum(number.value, 0.0)
        root = np.sqrt(value)
        near = number.error / (root + np.sqrt(np.maximum(value - number.error, 0.0)))
        error = np.where(value > number.error, near, np.sqrt(value + number.error))
        return _rounded(root, error, dtype)


def either(one: Bounded, other: Bounded) -> Bounded:
    """A number computed in one of two ways."""
    with np.errstate(invalid="ignore"):
        apart = np.nan_to_num(np.abs(one.value - other.value), nan=np.inf)
    return Bounded(value=one.value, error=np.maximum(one.error, other.error + apart))


def _rounded(value: Float64, error: Float64, dtype: Dtype) -> Bounded:
    """One rounding by whoever computes and one by the evaluation here."""
    target = FORMATS[dtype]
    with np.errstate(over="ignore", invalid="ignore"):
        reach = np.abs(value) + error
        grown = (error + reach * (target.u + _DOUBLE.u) + target.eta) * (1.0 + EVALUATION)
        lost = ~(reach * (1.0 + target.u) < target.largest)
    return Bounded(value=np.asarray(value), error=np.where(lost, np.inf, grown))

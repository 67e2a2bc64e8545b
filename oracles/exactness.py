"""Which gradient elements of a dyadic case are exact in every order of evaluation.

Small integers times powers of two add, multiply and average without rounding as long as they fit
the significand. Then nothing is allowed: the engine's element equals the truth bit for bit, and a
wrong factor of any size shows. Nothing is assumed: an element is certified by computing it.

1. The narrow replay equals the one in double, for every rank and reduction: no rounding took place
   locally. A value that had been rounded in double would have to end in 29 zero bits by chance.
2. In integers, in units of the lowest bit any of its contributions has, every sum of the declared
   reduction fits the significand: sum |L| <= 2^digits bounds every partial sum in every order.
3. Every declared division leaves an integer: by a power of two it moves the unit, and what is left
   (3 at three ranks, 1.5 = 3 / 2) must divide. The loss carries the factor W, so it mostly does.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from fsdp_engine.contract.case import Dtype, Mesh
from fsdp_engine.contract.observation import Numerics
from oracles.arrays import Float64, Mask, float64_of
from oracles.replay import LocalGradients
from oracles.rounding import FORMATS

_Integers = npt.NDArray[np.int64]


def exact_elements(
    name: str,
    shape: tuple[int, ...],
    *,
    narrow: LocalGradients,
    wide: LocalGradients,
    numerics: Numerics,
    mesh: Mesh,
) -> Mask:
    """The elements of one parameter's gradient that no legal order of evaluation can round.

    `narrow` is the replay under the declared dtypes (in float32 where those are float64, so that
    it can tell), `wide` the one in double.
    """
    values, reference = _table(narrow, name, shape), _table(wide, name, shape)
    exact: Mask = (values == reference).all((0, 1))
    sums = _Sums(values, exact, mesh)
    for step in range(len(values)):
        sums.reduce(step, numerics)
    sums.finish(numerics.shard_accumulate)
    return exact


class _Sums:
    """The declared reduction in integers; clears elements of `exact` that may round."""

    def __init__(self, values: Float64, exact: Mask, mesh: Mesh) -> None:
        self._exact = exact
        self._mesh = mesh
        self._integers, self._unit = _in_units(values, exact)
        self._total = np.zeros(values.shape[2:], dtype=np.int64)
        self._end_unit = self._unit

    def reduce(self, step: int, numerics: Numerics) -> None:
        mesh, dtype = self._mesh, numerics.reduce
        grid = self._integers[step].reshape(mesh.replicas, mesh.shards, *self._exact.shape)
        unit = self._unit
        self._require_fit(np.abs(grid).max((0, 1), initial=0), unit, dtype)
        for level in numerics.levels:
            grid, unit = self._divide(grid, unit, level.before)
            if level.fused and math.frexp(level.before)[0] != 0.5:
                self._exact[...] = False  # the inverse is rounded
            axis = 1 if level.axis == "shard" else 0
            if level.size > 1:
                sums = np.abs(grid).sum(axis, keepdims=True)
                self._require_fit(sums.max((0, 1)), unit, dtype)
                grid = grid.sum(axis, keepdims=True)
            grid, unit = self._divide(grid, unit, level.after)
        self._require_fit(np.abs(grid).max((0, 1)), unit, dtype)
        self._total += np.abs(grid[0, 0])
        self._end_unit = unit

    def finish(self, dtype: Dtype) -> None:
        """The shards of all reductions are added in `dtype`."""
        self._require_fit(self._total, self._end_unit, dtype)

    def _divide(
        self, grid: _Integers, unit: _Integers, divisor: float
    ) -> tuple[_Integers, _Integers]:
        fraction = Fraction(divisor)
        twos = (fraction.numerator & -fraction.numerator).bit_length() - 1
        odd = fraction.numerator >> twos
        if odd > np.iinfo(np.int64).max:
            self._exact[...] = False
            return grid, unit
        self._exact &= (grid % odd == 0).all((0, 1))
        return grid // odd, unit - twos + fraction.denominator.bit_length() - 1

    def _require_fit(self, integers: _Integers, unit: _Integers, dtype: Dtype) -> None:
        form = FORMATS[dtype]
        largest_exponent = int(np.frexp(form.largest)[1])
        self._exact &= integers <= 2**form.digits
        self._exact &= unit >= form.smallest_exponent
        self._exact &= unit + form.digits < largest_exponent


def _table(local: LocalGradients, name: str, shape: tuple[int, ...]) -> Float64:
    """`[reductions, ranks, *shape]` in double; absent gradients are zeros."""
    steps = range(len(local.reduced[0]))
    rows = [
        [
            float64_of(rank[t][name]) if name in rank[t] else np.zeros(shape)
            for rank in local.reduced
        ]
        for t in steps
    ]
    return np.asarray(rows, dtype=np.float64).reshape(len(rows), len(local.reduced), *shape)


def _in_units(values: Float64, exact: Mask) -> tuple[_Integers, _Integers]:
    """Per element, all contributions as integers times 2^unit, `unit` as large as possible.

    Elements that need more than 53 bits, or are not finite, are cleared in `exact`.
    """
    exact &= np.isfinite(values).all((0, 1))
    safe = np.where(exact, values, 0.0)
    significand, exponent = np.frexp(safe)
    whole = (significand * 2.0**53).astype(np.int64)
    lowest = np.frexp((whole & -whole).astype(np.float64))[1] - 1
    units = np.where(whole == 0, np.iinfo(np.int64).max, exponent.astype(np.int64) - 53 + lowest)
    unit: _Integers = units.min((0, 1))
    unit = np.where(unit == np.iinfo(np.int64).max, 0, unit)
    scaled = np.ldexp(np.abs(safe), -unit)
    exact &= (scaled < 2.0**53).all((0, 1))
    integers = np.where(exact, np.ldexp(safe, -unit), 0.0).astype(np.int64)
    return integers, unit

"""How far a reduced gradient may be from the exact mean of the local gradients.

Notation: W ranks, T reductions (M micro-batches if eager, one if deferred), L[r,t] the local
gradient of rank r at reduction t as replayed bit for bit, mean = (1/W) sum L and
A = (1/W) sum |L|, both exact and elementwise. The engine computes the same sum with roundings.

Standard model (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., 2.2 and 2.8):
fl(x op y) = (x op y)(1 + d) + e with |d| <= u, |e| <= eta / 2, where e is zero for additions and
casts or divisions fall under e only where the result is subnormal. Terms:

- n, roundings in the reduce dtype that one L meets on its way: one for the cast into it if that is
  not exact, size - 1 additions per level whatever the order (section 4.2: every tree over `size`
  leaves has depth <= size - 1), one per division by a number that is no power of two, two where
  a fused level multiplies by the rounded inverse. Together a factor within 1 +- gamma(n, u_reduce)
  (lemma 3.1). A level that adds in a finer dtype and rounds its sum has fewer.
- k, roundings in the dtype the shards are added in: one for the cast from the reduce dtype if that
  is not exact, T - 1 additions of the running sum. A factor within (1 + u_shard)^k.
- B, what underflow adds: eta / 2 per cast or division, carried through the later sums and
  divisions, for each of the T reductions.

Each L thus arrives as L (1 + d) with |d| <= (1 + gamma)(1 + u_shard)^k - 1; the triangle inequality
gives |G - mean| <= ((1 + gamma)(1 + u_shard)^k - 1) A + B. Attained, so compare with `<=`.

Where replay finds that it does not repeat itself, L is known up to a spread s in the mean
(`oracles.calibration`): A grows by s, and the deviation by s itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fsdp_engine.contract.case import Dtype
from fsdp_engine.contract.observation import Numerics
from oracles.arrays import Float64

EVALUATION = 2.0**-49
"""Relative slack for evaluating the bound itself in double: about ten operations of 1.5 ulp."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A binary floating-point format.

    `digits` of significand, unit roundoff `u`, smallest subnormal `eta`, largest finite number.
    """

    digits: int
    smallest_exponent: int
    largest: float

    @property
    def u(self) -> float:
        return 2.0**-self.digits

    @property
    def eta(self) -> float:
        return 2.0**self.smallest_exponent


FORMATS: dict[Dtype, Format] = {
    "float64": Format(digits=53, smallest_exponent=-1074, largest=float(np.finfo(np.float64).max)),
    "float32": Format(digits=24, smallest_exponent=-149, largest=(2 - 2.0**-23) * 2.0**127),
    "bfloat16": Format(digits=8, smallest_exponent=-133, largest=(2 - 2.0**-7) * 2.0**127),
    "float16": Format(digits=11, smallest_exponent=-24, largest=65504.0),
}


def holds(wide: Dtype, narrow: Dtype) -> bool:
    """Whether every number of `narrow` is one of `wide`: the cast never rounds."""
    one, other = FORMATS[wide], FORMATS[narrow]
    return (
        one.digits >= other.digits
        and one.smallest_exponent <= other.smallest_exponent
        and one.largest >= other.largest
    )


def gamma(n: int, u: float) -> float:
    """Bounds |prod (1 + d_i) - 1| over n roundings: n u / (1 - n u) (Higham, lemma 3.1)."""
    assert n * u < 1.0
    return n * u / (1.0 - n * u)


def local_dtype(numerics: Numerics) -> Dtype:
    """The dtype of the local gradients as they enter the reduction."""
    return numerics.local_accumulate if numerics.deferred else numerics.compute


def num_reductions(numerics: Numerics, num_micro_batches: int) -> int:
    """How often one gradient is reduced in a train action."""
    return 1 if numerics.deferred else num_micro_batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """|G - mean| <= relative * (A + spread) + absolute + spread, elementwise.

    `overflow`: from W * A on, a partial sum may pass the largest number of a dtype on the way.
    """

    relative: float
    absolute: float
    overflow: float

    def allowed(self, magnitude: Float64, spread: float = 0.0) -> Float64:
        """What is allowed per element; `magnitude` is A in double, rounded up or exact."""
        with np.errstate(over="ignore"):
            return (magnitude + spread) * self.relative + (self.absolute + spread)


def allowance(numerics: Numerics, num_micro_batches: int) -> Allowance:
    """The bound's terms from the declared numerics; see the module for n, k and B."""
    reduce = FORMATS[numerics.reduce]
    shard = FORMATS[numerics.shard_accumulate]
    casts_in = not holds(numerics.reduce, local_dtype(numerics))
    casts_out = not holds(numerics.shard_accumulate, numerics.reduce)
    steps = num_reductions(numerics, num_micro_batches)

    n = int(casts_in)
    underflow = float(casts_in)  # per rank, in units of eta_reduce / 2
    for level in numerics.levels:
        n += level.size - 1 + sum(not _power_of_two(f) for f in (level.before, level.after))
        n += level.fused and not _power_of_two(level.before)
        if level.before != 1.0:
            underflow = underflow / level.before + 1.0
        underflow *= level.size
        if level.after != 1.0:
            underflow = underflow / level.after + 1.0
    k = int(casts_out) + steps - 1
    relative = math.expm1(math.log1p(gamma(n, reduce.u)) + k * math.log1p(shard.u))
    # halves last: eta / 2 itself is no double where the dtype is float64
    half_units = underflow * reduce.eta + (shard.eta if casts_out else 0.0)
    absolute = steps * half_units * 0.5
    if half_units:
        absolute = math.nextafter(absolute * (1.0 + relative), math.inf)
    smallest = min(reduce.largest, shard.largest)
    return Allowance(
        relative=relative * (1.0 + EVALUATION),
        absolute=absolute,
        overflow=smallest / (1.0 + relative),
    )


def accumulation(numerics: Numerics, num_micro_batches: int) -> float:
    """What adding up micro-batches locally may change, relative to the sum of the magnitudes.

    M - 1 additions in the local-accumulate dtype and, where it does not hold the compute dtype,
    one rounding of the first gradient.
    """
    roundings = num_micro_batches - 1 + int(not holds(numerics.local_accumulate, numerics.compute))
    u = FORMATS[numerics.local_accumulate].u
    return math.expm1(roundings * math.log1p(u)) * (1.0 + EVALUATION)


def _power_of_two(value: float) -> bool:
    return math.frexp(value)[0] == 0.5

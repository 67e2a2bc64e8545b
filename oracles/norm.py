"""The 2-norm of a whole gradient, and how far off an engine may compute it.

An engine adds up squares on every rank, for each tensor or for all of them at once, adds over the
shard group, and takes a root. torch does so in levels, with a root at the end of each and a square
at the start of the next (`torch/nn/utils/clip_grad.py`, `_NormPartial` of DTensor, FSDP1's
`clip_grad_norm_`): a tensor's local norm, the norm of the norms, the sum over the shard group,
the last two in either order. With n elements and T tensors on the fullest rank and S shards the
square of an element meets on its way, whatever the order of the sums (Higham, 4.2):

- inside a kernel, in the finer of the norm's dtype and float32, which torch accumulates in: two
  squares, n + T additions, two roots;
- in the norm's dtype: a rounding of each kernel's result where that is coarser, a square, S - 1
  additions and a root between the ranks.

A rounding under a root counts half: sqrt(x (1 + d)) = sqrt(x) (1 + d)^(1/2). Squares may underflow;
an error of a in a sum of squares s moves its root by at most min(sqrt(a), a / sqrt(s)). Where a
square may pass the largest number, infinity is legal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fsdp_engine.contract.case import Dtype
from fsdp_engine.contract.observation import LocalArray
from oracles.arrays import Float64
from oracles.rounding import EVALUATION, FORMATS, holds
from oracles.verdict import Mismatch

_DOUBLE_ROUNDOFF = 2.0**-53


@dataclass(frozen=True, slots=True, kw_only=True)
class NormAllowance:
    """|norm - exact| <= relative * exact + min(sqrt(squares), squares / exact) + results.

    `squares` is what sums of squares lose by underflow, `results` what norms lose. From the norm
    `overflow` on, its square may be infinite.
    """

    relative: float
    squares: float
    results: float
    overflow: float

    def allowed(self, norm: float) -> float:
        """What is allowed at an exact norm."""
        root = math.sqrt(self.squares)
        lost = min(root, self.squares / norm) if norm else root
        return (self.relative * norm + lost + self.results) * (1.0 + EVALUATION)


def norm_allowance(
    *, num_elements: int, num_tensors: int, shards: int, norm: Dtype
) -> NormAllowance:
    """The bound for a declared `Numerics.norm`.

    `num_elements` and `num_tensors` are those of the fullest rank, `shards` the ranks whose parts
    are added.
    """
    kernel: Dtype = norm if holds(norm, "float32") else "float32"
    narrow, wide = FORMATS[norm], FORMATS[kernel]
    in_kernel = 0.5 * (num_elements + num_tensors) + 3.0
    in_norm = 0.5 * shards + 1.0 + (0.0 if holds(norm, kernel) else 2.0)
    own = 2.0  # the exact norm is evaluated in double: its squares and its root
    exponent = (
        in_kernel * math.log1p(-wide.u)
        + in_norm * math.log1p(-narrow.u)
        + own * math.log1p(-_DOUBLE_ROUNDOFF)
    )
    relative = math.expm1(-exponent)
    squares = (num_elements * shards + num_tensors) * wide.eta
    squares += num_tensors * (shards + 1) * narrow.eta
    return NormAllowance(
        relative=relative,
        squares=squares * (1.0 + relative) ** 2,
        results=(num_tensors + 2) * narrow.eta * (1.0 + relative),
        overflow=math.sqrt(narrow.largest) / (1.0 + relative),
    )


def allowance_of(
    gradients: Sequence[Sequence[LocalArray]], *, shards: int, norm: Dtype
) -> NormAllowance:
    """The bound for every rank's parts of the gradient."""
    present = [[part.data for part in parts if part.data is not None] for parts in gradients]
    return norm_allowance(
        num_elements=max(sum(math.prod(data.shape) for data in rank) for rank in present),
        num_tensors=max(map(len, present)),
        shards=shards,
        norm=norm,
    )


def exact_norm(gradients: Mapping[str, Float64]) -> float:
    """The 2-norm, with the roundings of one square and one root in double.

    Not finite where an element is not.
    """
    largest = max((float(np.abs(g).max(initial=0.0)) for g in gradients.values()), default=0.0)
    if not math.isfinite(largest) or not largest:
        return largest
    # Scaled by a power of two, so that squares neither overflow nor underflow.
    exponent = math.frexp(largest)[1]
    squares = [np.ldexp(g, -exponent).ravel() ** 2 for g in gradients.values()]
    return math.ldexp(math.sqrt(math.fsum(np.concatenate(squares).tolist())), exponent)


def norm_mismatches(
    where: str, got: float, exact: float, bound: NormAllowance, *, off_by: float = 0.0
) -> tuple[list[Mismatch], float]:
    """One rank's norm against the exact one of gradients that may be wrong by `off_by` in norm.

    Returns the margin too.
    """
    if not math.isfinite(exact):
        if not math.isfinite(got):
            return [], 0.0
        wanted = "nan or infinite: a gradient is not finite"
        return [Mismatch(where=where, got=repr(got), wanted=wanted)], math.inf
    if not math.isfinite(got):
        if exact + off_by >= bound.overflow:
            return [], 0.0
        return [Mismatch(where=where, got=repr(got), wanted=repr(exact))], math.inf
    allowed = bound.allowed(exact) + off_by * (1.0 + bound.relative)
    off = abs(got - exact)
    margin = off / allowed if allowed else (math.inf if off else 0.0)
    if off <= allowed:
        return [], margin
    return [
        Mismatch(where=where, got=repr(got), wanted=repr(exact), off=off, allowed=allowed)
    ], margin

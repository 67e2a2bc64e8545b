"""Clipping by the global norm: every gradient times min(1, clip / (norm + 1e-6)).

The norm is the one that the engine returned. The factor is computed in the norm's dtype (torch:
`clip_grad_norm_`, a sum, a reciprocal, a product), put into the gradient's dtype and multiplied
with. Where the norm's dtype is coarser than float32, the engine may have gone on with the norm as
it was before its last rounding, as FSDP1 does.
"""

from __future__ import annotations

from fsdp_engine.contract.case import Dtype
from oracles.arrays import Float64
from oracles.rounding import holds
from oracles.running_error import Bounded, add, divide, exact, multiply, rounded

EPSILON = 1e-6


def clip_factor(norm: float, clip_grad: float, dtype: Dtype) -> Bounded:
    """The factor and how far off it may be, for a finite norm in `dtype`."""
    used = exact(norm)
    if not holds(dtype, "float32"):
        used = rounded(used, dtype)
    shifted = add(used, rounded(exact(EPSILON), dtype), dtype)
    inverse = divide(exact(1.0), shifted, dtype)
    factor = multiply(rounded(exact(clip_grad), dtype), inverse, dtype)
    if factor.value > 1.0:
        # min(1, x) moves no more than x, and from far enough above not at all.
        surely = factor.value - factor.error >= 1.0
        return exact(1.0) if surely else Bounded(value=exact(1.0).value, error=factor.error)
    return factor


def clipped(gradient: Float64, factor: Bounded, storage: Dtype) -> Bounded:
    """A gradient after clipping; the same bits where the factor is 1 for certain."""
    if factor.value == 1.0 and not factor.error:
        return exact(gradient)
    return multiply(exact(gradient), rounded(factor, storage), storage)

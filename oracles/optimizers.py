"""One optimizer step as a map from an engine's own state, with a bound on every element.

    SGD     theta' = theta - lr (g + wd theta)

    AdamW   m' = b1 m + (1 - b1) g              v' = b2 v + (1 - b2) g^2              t' = t + 1
            theta' = (1 - lr wd) theta - lr / (1 - b1^t') * m' / (sqrt(v' / (1 - b2^t')) + eps)

The bound covers torch's order of operations, one kernel after the other with a rounding into the
storage dtype each (`torch/optim/sgd.py`, `adam.py`, single tensor and foreach), and fused kernels,
which leave roundings out or write m' as a sum of two products (`fused_adam_utils.cuh`,
`FusedAdamKernel.cpp`). Inside a kernel bfloat16 is computed in float32, with numbers of the
configuration cast to float32; but `add` casts its `alpha` and a number it adds to the storage dtype
(measured on CPU). Bias corrections are computed in double: `capturable=True`, which computes
1 - b2^t in float32 and so loses up to 1 / (1 - b2) units, is not covered.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_engine.contract.case import Dtype
from oracles.arrays import Float64
from oracles.rounding import holds
from oracles.running_error import (
    Bounded,
    add,
    divide,
    either,
    exact,
    multiply,
    rounded,
    square_root,
    stored,
)

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8

_DOUBLE: Dtype = "float64"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWStep:
    """What AdamW leaves: parameter, first and second moment."""

    parameter: Bounded
    exp_avg: Bounded
    exp_avg_sq: Bounded


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWState:
    """What AdamW keeps of a parameter before a step; `step` counts the steps so far.

    `step` has the shape of the moments or none.
    """

    exp_avg: Float64
    exp_avg_sq: Float64
    step: Float64


def sgd_step(
    parameter: Float64, gradient: Float64, *, lr: Bounded, weight_decay: float, storage: Dtype
) -> Bounded:
    """The parameter after a step of SGD without momentum."""
    old, direction = exact(parameter), exact(gradient)
    if weight_decay:
        decay = rounded(exact(weight_decay), storage)
        direction = add(direction, multiply(decay, old, storage), storage)
    return add(old, -multiply(rounded(lr, storage), direction, storage), storage)


def adamw_step(
    parameter: Float64,
    gradient: Float64,
    state: AdamWState,
    *,
    lr: Bounded,
    weight_decay: float,
    storage: Dtype,
) -> AdamWStep:
    """Parameter and moments after a step of AdamW with the betas and epsilon of `Optimizer`."""
    inside: Dtype = storage if holds(storage, "float32") else "float32"
    g, steps = exact(gradient), exact(state.step + 1.0)
    first = _first_moment(exact(state.exp_avg), g, inside, storage)
    second = _second_moment(exact(state.exp_avg_sq), g, inside, storage)

    step_size = rounded(divide(lr, _bias_correction(BETA1, steps), _DOUBLE), inside)
    correction = rounded(square_root(_bias_correction(BETA2, steps), _DOUBLE), inside)
    root = stored(square_root(second, inside), storage, computed=inside)
    # A division by a number may be done by its inverse: one rounding more.
    scaled = stored(rounded(divide(root, correction, inside), inside), storage, computed=inside)
    denominator = add(scaled, rounded(exact(EPSILON), storage), storage)

    old = exact(parameter)
    if weight_decay:
        product = multiply(lr, exact(weight_decay), _DOUBLE)
        kept = rounded(add(exact(1.0), -product, _DOUBLE), inside)
        old = stored(multiply(kept, old, inside), storage, computed=inside)
    update = multiply(step_size, divide(first, denominator, inside), inside)
    parameter_after = stored(add(old, -update, inside), storage, computed=inside)
    return AdamWStep(parameter=parameter_after, exp_avg=first, exp_avg_sq=second)


def _first_moment(old: Bounded, gradient: Bounded, inside: Dtype, storage: Dtype) -> Bounded:
    weight, kept = rounded(exact(1 - BETA1), inside), rounded(exact(BETA1), inside)
    difference = add(gradient, -old, inside)
    moved = add(old, multiply(weight, difference, inside), inside)
    summed = add(multiply(kept, old, inside), multiply(weight, gradient, inside), inside)
    return stored(either(moved, summed), storage, computed=inside)


def _second_moment(old: Bounded, gradient: Bounded, inside: Dtype, storage: Dtype) -> Bounded:
    weight, kept = rounded(exact(1 - BETA2), inside), rounded(exact(BETA2), inside)
    decayed = stored(multiply(kept, old, inside), storage, computed=inside)
    square_first = multiply(weight, multiply(gradient, gradient, inside), inside)
    weight_first = multiply(multiply(weight, gradient, inside), gradient, inside)
    added = add(decayed, either(weight_first, square_first), inside)
    return stored(added, storage, computed=inside)


def _bias_correction(beta: float, steps: Bounded) -> Bounded:
    """1 - beta^t; `pow` is within one unit in the last place, which is two roundings."""
    power = rounded(rounded(exact(beta**steps.value), _DOUBLE), _DOUBLE)
    return add(exact(1.0), -power, _DOUBLE)

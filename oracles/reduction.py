"""The mean over ranks: exactly, and as the declared levels would round it.

Two oracles. The exact one sums in compensated double, so that the only error left is below the
square of a double's roundoff. The emulation computes the declared levels bit for bit wherever the
order of a sum does not matter or can be enumerated: two operands commute, three have 3 binary
trees, four have 15; a backend's rings and halvings are such trees, element by element.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fsdp_engine.contract.case import Mesh
from fsdp_engine.contract.observation import Level, Numerics
from fsdp_engine.workload.models import TORCH_DTYPES
from oracles.arrays import Float64, float64_of
from oracles.replay import LocalGradients
from oracles.rounding import gamma

MAX_GROUP = 4
MAX_CANDIDATES = 256
"""Beyond these the set of possible results is too large to say anything."""

_DOUBLE_ROUNDOFF = 2.0**-53


def contributions(local: LocalGradients, name: str, shape: tuple[int, ...]) -> Float64:
    """All local gradients of one parameter in double, `[terms, *shape]`; absent ones left out."""
    found = [float64_of(gradients[name]) for rank in local.reduced for gradients in rank
             if name in gradients]  # fmt: skip
    return np.stack(found) if found else np.zeros((0, *shape))


def magnitude(terms: Float64, world_size: int) -> Float64:
    """A = (1/W) sum |L|, rounded up: the relative error of summing n doubles is gamma(n, u)."""
    roundup = 1.0 + 2.0 * (len(terms) + 2) * _DOUBLE_ROUNDOFF
    total: Float64 = np.abs(terms).sum(0) / world_size * roundup
    return total


def mean(terms: Float64, world_size: int) -> Float64:
    """The exact mean, rounded to double."""
    result: Float64 = _compensated_sum(list(terms), terms.shape[1:]) / world_size
    return result


def deviation(got: Float64, terms: Float64, world_size: int) -> Float64:
    """The deviation got - mean: one sum of all terms and W times -got, compensated."""
    addends = [*terms, *([-got] * world_size)]
    result: Float64 = _compensated_sum(addends, got.shape) / world_size
    return result


def deviation_slack(got: Float64, terms: Float64, world_size: int) -> Float64:
    """Error bound of `deviation`, apart from its last rounding.

    gamma(n - 1, u)^2 sum |x| for n addends (Ogita, Rump and Oishi, Accurate sum and dot product,
    SIAM J. Sci. Comput. 26 (2005), proposition 4.4), here of the order 1e-30 A.
    """
    n = len(terms) + world_size
    factor = gamma(n, _DOUBLE_ROUNDOFF) ** 2
    result: Float64 = factor * (magnitude(terms, world_size) + np.abs(got))
    return result


def _compensated_sum(addends: Sequence[Float64], shape: tuple[int, ...]) -> Float64:
    high, low = np.zeros(shape), np.zeros(shape)
    with np.errstate(invalid="ignore", over="ignore"):
        for x in addends:
            total = high + x
            virtual = total - high
            low += (high - (total - virtual)) + (x - virtual)  # Knuth's two-sum: exact error
            high = total
        result: Float64 = high + low
    return result


def emulate(
    local: LocalGradients, name: str, numerics: Numerics, mesh: Mesh
) -> list[Tensor] | None:
    """Every result the declared levels can give, in the shard-accumulate dtype.

    Each element of the engine's gradient equals that element in one of them; with groups of at
    most two there is a single candidate. Empty: no rank has a gradient. None: too many
    candidates, a group beyond four, fused levels or such as do not follow the mesh.
    """
    if any(level.fused and level.size > 1 for level in numerics.levels):
        return None
    steps = [[rank[t].get(name) for rank in local.reduced] for t in range(len(local.reduced[0]))]
    steps = [step for step in steps if any(gradient is not None for gradient in step)]
    if not levels_follow_mesh(numerics, mesh) or _num_candidates(numerics, len(steps)) is None:
        return None
    total: list[Tensor] = []
    for step in steps:
        reduced = [
            candidate.to(TORCH_DTYPES[numerics.shard_accumulate])
            for candidate in _reduce(step, numerics, mesh)
        ]
        total = [one + other for one in total for other in reduced] if total else reduced
    return total


def levels_follow_mesh(numerics: Numerics, mesh: Mesh) -> bool:
    """Whether the declared groups are the axes of the mesh, each once."""
    sizes = {"shard": 1, "replicate": 1}
    for level in numerics.levels:
        sizes[level.axis] *= level.size
    return sizes == {"shard": mesh.shards, "replicate": mesh.replicas}


def divides_by(numerics: Numerics) -> float:
    """The product of all declared divisions; a mean over W ranks divides by W."""
    return math.prod(level.before * level.after for level in numerics.levels)


def _num_candidates(numerics: Numerics, num_steps: int) -> int | None:
    count = 1
    for level in numerics.levels:
        if level.size > MAX_GROUP:
            return None
        trees = {1: 1, 2: 1, 3: 3, 4: 15}[level.size]
        count = trees * count**level.size
        if count > MAX_CANDIDATES:
            return None
    total: int = count**num_steps
    return total if total <= MAX_CANDIDATES else None


def _reduce(step: list[Tensor | None], numerics: Numerics, mesh: Mesh) -> list[Tensor]:
    """One reduction. Absent gradients count as zeros: a wrapper sends them so."""
    dtype = TORCH_DTYPES[numerics.reduce]
    like = next(gradient for gradient in step if gradient is not None)
    cast = [(torch.zeros_like(like) if g is None else g).to(dtype) for g in step]
    grid = [
        [[cast[replica * mesh.shards + shard]] for shard in range(mesh.shards)]
        for replica in range(mesh.replicas)
    ]
    for level in numerics.levels:
        if level.size == 1:
            grid = [[_scaled(_scaled(c, level.before), level.after) for c in row] for row in grid]
        elif level.axis == "shard":
            grid = [[_level(row, level)] for row in grid]
        else:
            grid = [[_level(list(column), level) for column in zip(*grid, strict=True)]]
    return grid[0][0]


def _level(members: list[list[Tensor]], level: Level) -> list[Tensor]:
    scaled = [_scaled(member, level.before) for member in members]
    return _scaled(_tree_sums(scaled), level.after)


def _scaled(candidates: list[Tensor], divisor: float) -> list[Tensor]:
    return candidates if divisor == 1.0 else [candidate / divisor for candidate in candidates]


def _tree_sums(members: list[list[Tensor]]) -> list[Tensor]:
    """The sums of all binary trees over the members, for every choice of their candidates."""
    if len(members) == 1:
        return members[0]
    first, rest = members[0], members[1:]
    sums: list[Tensor] = []
    for size in range(len(rest)):
        for with_first in itertools.combinations(range(len(rest)), size):
            left = [first, *(rest[i] for i in with_first)]
            right = [member for i, member in enumerate(rest) if i not in with_first]
            sums += [one + other for one in _tree_sums(left) for other in _tree_sums(right)]
    return sums

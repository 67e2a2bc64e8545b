"""What is allowed more where a device does not compute the same bits twice.

A GPU's kernels may depend on where their operands are, and some add in no fixed order. So what is
computed there is replayed twice, the second time with everything at other addresses. Where both
give the same bits nothing is added to any bound. Else each bound grows by how far the two are
apart: for a tensor by its worst element, since two replays are too few to know every element's own.

The reduced gradient is a mean over W ranks. If each local gradient L[r,t] is known up to d[r,t] in
every element, the mean of them is known up to (1/W) sum d[r,t].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from torch import Tensor

from oracles.arrays import Float64, float64_of, same_bits

WIDENED = "the bound is widened: the device's own replays differ"


def mean_spread(
    one: Sequence[Sequence[Mapping[str, Tensor]]], other: Sequence[Sequence[Mapping[str, Tensor]]]
) -> dict[str, float]:
    """Of two replays, `[rank][reduction]`: by name how far the means may be apart, where they may.

    A gradient that one of them has not is zero there.
    """
    spread: dict[str, float] = {}
    for first, second in _pairs(one, other):
        for name in first.keys() | second.keys():
            apart = _apart(first.get(name), second.get(name))
            if apart:
                spread[name] = spread.get(name, 0.0) + apart / len(one)
    return spread


def loss_spread(
    one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]
) -> dict[int, float]:
    """By rank how far the sums of its micro-batches' losses may be apart, where they may."""
    by_rank = {
        rank: sum(values_apart(np.array(a), np.array(b)) for a, b in zip(*pair, strict=True))
        for rank, pair in enumerate(zip(one, other, strict=True))
    }
    return {rank: apart for rank, apart in by_rank.items() if apart}


def values_apart(one: Float64, other: Float64) -> float:
    """The largest difference of two finite elements; those that are not finite are judged apart."""
    finite = np.isfinite(one) & np.isfinite(other)
    difference = np.abs(np.where(finite, one, 0.0) - np.where(finite, other, 0.0))
    return float(difference.max(initial=0.0))


def widened(apart: float) -> str:
    """What a sentence about a difference says of its bound."""
    return f" ({WIDENED}, by up to {apart:.3g})" if apart else ""


def _pairs(
    one: Sequence[Sequence[Mapping[str, Tensor]]], other: Sequence[Sequence[Mapping[str, Tensor]]]
) -> Iterator[tuple[Mapping[str, Tensor], Mapping[str, Tensor]]]:
    for rank, again in zip(one, other, strict=True):
        yield from zip(rank, again, strict=True)


def _apart(one: Tensor | None, other: Tensor | None) -> float:
    if one is not None and other is not None:
        if same_bits(one, other):
            return 0.0
        return values_apart(float64_of(one), float64_of(other))
    alone = float64_of(one if one is not None else other)  # type: ignore[arg-type]  # one is there
    return values_apart(alone, np.zeros_like(alone))

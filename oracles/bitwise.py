"""Comparisons of recorded data that allow nothing: dtype, shape and every bit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from fsdp_engine.contract.observation import Array, LocalArray
from oracles.arrays import bits, float64_of, tensor_of
from oracles.verdict import Mismatch


def array_mismatches(where: str, got: Array, wanted: Array) -> list[Mismatch]:
    """At most one sentence: the dtype, the shape or the first element that differs in a bit."""
    if got.dtype != wanted.dtype:
        return [Mismatch(where=f"{where} dtype", got=got.dtype, wanted=wanted.dtype)]
    if got.shape != wanted.shape:
        return [Mismatch(where=f"{where} shape", got=str(got.shape), wanted=str(wanted.shape))]
    if got.data == wanted.data:
        return []
    one, other = tensor_of(got), tensor_of(wanted)
    differs = (bits(one) != bits(other)).reshape(-1, one.dtype.itemsize).any(1)
    flat = int(np.flatnonzero(differs)[0])
    index = [int(i) for i in torch.unravel_index(torch.tensor(flat), one.shape)]
    if not one.dtype.is_floating_point:
        left, right = (str(tensor.reshape(-1)[flat].item()) for tensor in (one, other))
        return [Mismatch(where=f"{where}{index}", got=left, wanted=right)]
    low, high = (float(float64_of(tensor).reshape(-1)[flat]) for tensor in (one, other))
    return [
        Mismatch(
            where=f"{where}{index}",
            got=repr(low),
            wanted=f"{high!r} bit for bit ({int(differs.sum())} elements differ)",
            off=abs(low - high),
            allowed=0.0,
        )
    ]


def part_mismatches(
    where: str, got: Sequence[LocalArray], wanted: Sequence[LocalArray]
) -> list[Mismatch]:
    """Two lists of one rank's parts, name by name."""
    names = [[part.name for part in parts] for parts in (got, wanted)]
    if names[0] != names[1]:
        return [Mismatch(where=f"{where} names", got=str(names[0]), wanted=str(names[1]))]
    mismatches: list[Mismatch] = []
    for one, other in zip(got, wanted, strict=True):
        place = f"{where} {one.name}"
        if (one.full_shape, one.placement) != (other.full_shape, other.placement):
            told = [f"{part.placement} of {part.full_shape}" for part in (one, other)]
            mismatches.append(Mismatch(where=place, got=told[0], wanted=told[1]))
        elif one.data is None or other.data is None:
            if one.data is not other.data:
                told = ["absent" if part.data is None else "present" for part in (one, other)]
                mismatches.append(Mismatch(where=place, got=told[0], wanted=told[1]))
        else:
            mismatches += array_mismatches(place, one.data, other.data)
    return mismatches

"""Parts of a tensor: tiling, replicas, absence, and data that is not what it says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fsdp_engine.contract.case import Mesh
from fsdp_engine.contract.observation import FlatRange, LocalArray, Placement, Replicate, Shard
from oracles.arrays import array_of, bits, float64_of, same_bits, tensor_of
from oracles.assembly import Assembled, assemble, replica_mismatches

FULL = torch.arange(15, dtype=torch.float32).reshape(5, 3)
SHAPES = {"w": (5, 3)}


def part(placement: Placement, data: Tensor | None) -> LocalArray:
    return LocalArray(
        name="w",
        full_shape=(5, 3),
        placement=placement,
        data=None if data is None else array_of(data),
    )


def rows(start: int, stop: int) -> LocalArray:
    return part(Shard(dim=0, start=start, length=stop - start), FULL[start:stop])


def flat(start: int, stop: int) -> LocalArray:
    return part(FlatRange(start=start, stop=stop), FULL.flatten()[start:stop])


def put_together(*parts: LocalArray, replicas: int = 1) -> Assembled:
    shape = (replicas, len(parts) // replicas)
    return assemble([[p] for p in parts], mesh=Mesh(shape=shape), shapes=SHAPES, where="gradient")


@pytest.mark.parametrize(
    "parts",
    [
        [rows(0, 2), rows(2, 4), rows(4, 5), rows(5, 5)],
        [rows(0, 5), rows(5, 5)],
        [flat(0, 7), flat(7, 15), flat(0, 0)],
        [part(Replicate(), FULL), part(Replicate(), FULL)],
        [
            part(Shard(dim=1, start=0, length=2), FULL[:, :2]),
            part(Shard(dim=1, start=2, length=1), FULL[:, 2:]),
        ],
    ],
    ids=["uneven", "one rank", "flat", "replicated", "second dim"],
)
def test_what_tiles_is_joined(parts: list[LocalArray]) -> None:
    assembled = put_together(*parts)
    assert assembled.mismatches == ()
    tensor = assembled.full["w"]
    assert tensor is not None
    assert same_bits(tensor, FULL)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([rows(0, 2), rows(3, 5)], "a gap: got 2 to 3"),
        ([rows(0, 2), rows(2, 4)], "a gap: got 4 to 5"),
        ([rows(0, 3), rows(2, 5)], "an overlap: got 2 to 3"),
        ([flat(0, 7), flat(6, 15)], "an overlap: got 6 to 7"),
        ([rows(0, 2), flat(6, 15)], "placements"),
        ([replace(rows(0, 2), full_shape=(3, 5)), rows(2, 5)], "full shape: got (3, 5)"),
        ([rows(0, 2), part(Shard(dim=0, start=2, length=3), FULL[:2])], "local shape"),
        ([rows(0, 2), part(Shard(dim=2, start=2, length=3), None)], "placements"),
        ([rows(0, 2), part(rows(2, 5).placement, None)], "absent on 1 of 2 ranks"),
        ([rows(0, 2), part(rows(2, 5).placement, FULL[2:].double())], "dtypes"),
        ([part(Replicate(), FULL), part(Replicate(), FULL + 1)], "as on replica 0"),
        ([part(FlatRange(start=9, stop=3), FULL[:0]), flat(0, 15)], "local shape"),
    ],
)
def test_what_does_not_fit_is_named(parts: list[LocalArray], words: str) -> None:
    assembled = put_together(*parts)
    assert "w" not in assembled.full
    (mismatch,) = assembled.mismatches
    assert mismatch.where.startswith("gradient w")
    assert words in str(mismatch)


def test_bytes_that_do_not_fill_the_shape_are_named() -> None:
    array = array_of(FULL[:2])
    short = replace(rows(0, 2), data=replace(array, data=array.data[:-1]))
    (mismatch,) = put_together(short, rows(2, 5)).mismatches
    assert "23 bytes, not 24" in str(mismatch)
    unknown = replace(rows(0, 2), data=replace(array, dtype="complex64"))
    (mismatch,) = put_together(unknown, rows(2, 5)).mismatches
    assert "complex64" in str(mismatch)


def test_absent_everywhere_is_absent_and_empty_parts_say_nothing() -> None:
    absent = put_together(part(rows(0, 5).placement, None), rows(5, 5))
    assert (absent.full, absent.mismatches) == ({"w": None}, ())
    present = put_together(rows(0, 5), part(rows(5, 5).placement, None))
    assert present.mismatches == ()
    assert present.full["w"] is not None


def test_names_are_compared() -> None:
    odd = replace(rows(0, 5), name="v")
    assembled = assemble(
        [[odd], [rows(0, 5), rows(0, 5)]],
        mesh=Mesh(shape=(2, 1)),
        shapes=SHAPES,
        where="gradient",
    )
    said = " ".join(map(str, assembled.mismatches))
    assert "gradient w, rank 0: got nothing, should be an entry" in said
    assert "gradient v, rank 0: got an entry, should be no such name" in said
    assert "rank 1 w: got two entries, should be one" in said


def test_replicas_differ_in_a_bit_or_in_presence() -> None:
    zero = FULL.clone()
    negative = FULL.clone()
    negative[0, 0] = -0.0
    whole = Shard(dim=0, start=0, length=5)
    same = put_together(part(whole, zero), part(whole, zero.clone()), replicas=2)
    assert replica_mismatches(same, where="gradient") == []
    signs = put_together(part(whole, zero), part(whole, negative), replicas=2)
    (mismatch,) = replica_mismatches(signs, where="gradient")
    assert str(mismatch).startswith("gradient w, replica 1[0, 0]: got -0.0, should be 0.0")
    gone = put_together(part(whole, zero), part(whole, None), replicas=2)
    (mismatch,) = replica_mismatches(gone, where="gradient")
    assert "got absent, should be present" in str(mismatch)


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool],
    ids=str,
)
def test_arrays_survive_both_ways(dtype: torch.dtype) -> None:
    gen = torch.Generator().manual_seed(1)
    tensor = torch.randn(3, 4, generator=gen, dtype=torch.float64).to(dtype)
    if dtype.is_floating_point:
        tensor[0, 0], tensor[0, 1], tensor[0, 2] = float("nan"), float("-inf"), -0.0
    back = tensor_of(array_of(tensor.t()))
    assert same_bits(back, tensor.t())
    assert bits(back).size == 12 * dtype.itemsize
    assert float64_of(tensor).shape == (3, 4)
    scalar = torch.ones((), dtype=dtype)
    assert same_bits(tensor_of(array_of(scalar)), scalar)
    empty = torch.empty((0, 4), dtype=dtype)
    assert same_bits(tensor_of(array_of(empty)), empty)

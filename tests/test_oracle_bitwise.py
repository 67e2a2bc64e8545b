"""Comparisons that allow nothing name the tensor, the element and both values."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fsdp_engine.contract.observation import Array, FlatRange, LocalArray, Replicate
from oracles.arrays import array_of
from oracles.bitwise import array_mismatches, part_mismatches

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def matrix(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor([[0.0, 1.0, -2.0], [0.5, 3.0, 4.0]], dtype=dtype)


def changed(dtype: torch.dtype, value: float) -> Array:
    """The matrix with another element in its second row."""
    tensor = matrix(dtype)
    tensor[1, 2] = value
    return array_of(tensor)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("value", "told"),
    [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf"), (-4.0, "-4.0"), (0.0, "0.0")],
)
def test_the_element_and_both_values_are_named(dtype: torch.dtype, value: float, told: str) -> None:
    got, wanted = changed(dtype, value), array_of(matrix(dtype))
    (mismatch,) = array_mismatches("action 0 (train) w", got, wanted)
    expected = f"action 0 (train) w[1, 2]: got {told}, should be 4.0 bit for bit"
    assert str(mismatch).startswith(expected)
    (mismatch,) = array_mismatches("w", wanted, got)
    assert f"w[1, 2]: got 4.0, should be {told} bit for bit" in str(mismatch)
    assert array_mismatches("w", got, changed(dtype, value)) == []


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_one_bit_is_enough(dtype: torch.dtype) -> None:
    negative = matrix(dtype)
    negative[0, 0] = -0.0
    (mismatch,) = array_mismatches("w", array_of(negative), array_of(matrix(dtype)))
    assert str(mismatch).startswith("w[0, 0]: got -0.0, should be 0.0 bit for bit (1 elements")
    size = dtype.itemsize
    for flat in range(6):  # the lowest bit of each element in turn
        raw = bytearray(array_of(matrix(dtype)).data)
        raw[flat * size] ^= 1
        array = replace(array_of(matrix(dtype)), data=bytes(raw))
        (mismatch,) = array_mismatches("w", array, array_of(matrix(dtype)))
        assert mismatch.where == f"w[{flat // 3}, {flat % 3}]"
        assert mismatch.got != mismatch.wanted.split()[0]


def test_two_kinds_of_nan_differ() -> None:
    quiet = array_of(torch.tensor([math.nan]))
    other = replace(quiet, data=bytes([1, *quiet.data[1:]]))
    (mismatch,) = array_mismatches("w", other, quiet)
    assert str(mismatch).startswith("w[0]: got nan, should be nan bit for bit")


def test_dtype_and_shape_come_before_values() -> None:
    full = array_of(matrix())
    (mismatch,) = array_mismatches("w", array_of(matrix(torch.bfloat16)), full)
    assert str(mismatch) == "w dtype: got bfloat16, should be float32"
    (mismatch,) = array_mismatches("w", array_of(matrix().t()), full)
    assert str(mismatch) == "w shape: got (3, 2), should be (2, 3)"
    scalar = array_of(torch.tensor(2.0))
    (mismatch,) = array_mismatches("w", array_of(torch.tensor(3.0)), scalar)
    assert str(mismatch).startswith("w[]: got 3.0, should be 2.0")


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool], ids=str)
def test_whole_numbers_are_told_as_such(dtype: torch.dtype) -> None:
    one, other = torch.tensor([1, 0]).to(dtype), torch.tensor([1, 1]).to(dtype)
    (mismatch,) = array_mismatches("revision", array_of(one), array_of(other))
    assert mismatch.where == "revision[1]"
    assert (mismatch.got, mismatch.wanted) == (str(one[1].item()), str(other[1].item()))


PART = LocalArray(name="w", full_shape=(2, 3), placement=Replicate(), data=array_of(matrix()))
MOVED = replace(PART, placement=FlatRange(start=0, stop=6))


@pytest.mark.parametrize(
    ("got", "told"),
    [
        ((), "rank 1 parameter names: got [], should be ['w']"),
        ((PART, replace(PART, name="v")), "names: got ['w', 'v'], should be ['w']"),
        ((PART, PART), "names: got ['w', 'w'], should be ['w']"),
        ((replace(PART, data=None),), "rank 1 parameter w: got absent, should be present"),
        ((replace(PART, full_shape=(3, 2)),), "of (3, 2), should be Replicate(kind='replicate')"),
        ((MOVED,), "rank 1 parameter w: got FlatRange(kind='flat', start=0, stop=6) of (2, 3)"),
        (
            (replace(PART, data=changed(torch.float32, math.inf)),),
            "rank 1 parameter w[1, 2]: got inf, should be 4.0",
        ),
    ],
    ids=["missing", "extra", "twice", "absent", "shape", "placement", "element"],
)
def test_parts_are_compared_by_name(got: tuple[LocalArray, ...], told: str) -> None:
    (mismatch,) = part_mismatches("rank 1 parameter", got, (PART,))
    assert told in str(mismatch)
    assert part_mismatches("rank 1 parameter", (PART, MOVED), (PART, MOVED)) == []

"""Tensors as data and back, and exact conversion to double for comparisons.

Every dtype of a case (float16, bfloat16, float32, float64) is a subset of float64, so `float64_of`
never rounds.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fsdp_engine.contract.observation import Array

Float64: TypeAlias = npt.NDArray[np.float64]
Mask: TypeAlias = npt.NDArray[np.bool_]

_TORCH: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}


def dtype_name(dtype: torch.dtype) -> str:
    """What torch calls a dtype, without the module, as `Array.dtype` has it."""
    return str(dtype).removeprefix("torch.")


def tensor_of(array: Array) -> Tensor:
    """The array as a CPU tensor of its own memory, of `array.shape` and the dtype it names.

    Raises:
        ValueError: an unknown dtype, or bytes that do not fill the shape.
    """
    dtype = _TORCH.get(array.dtype)
    if dtype is None:
        raise ValueError(f"array dtype {array.dtype!r} is unknown; legal are {sorted(_TORCH)}")
    wanted = math.prod(array.shape) * dtype.itemsize
    if len(array.data) != wanted:
        raise ValueError(
            f"array of {array.dtype} {array.shape} has {len(array.data)} bytes, not {wanted}"
        )
    if not array.data:
        return torch.empty(array.shape, dtype=dtype)
    return torch.frombuffer(bytearray(array.data), dtype=dtype).reshape(array.shape)


def array_of(tensor: Tensor) -> Array:
    """The tensor as data, bit for bit."""
    plain = tensor.detach().cpu().contiguous()
    return Array(
        dtype=dtype_name(plain.dtype), shape=tuple(plain.shape), data=bits(plain).tobytes()
    )


def bits(tensor: Tensor) -> npt.NDArray[np.uint8]:
    """The tensor's bytes in row-major order, for comparisons that allow nothing."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    raw: npt.NDArray[np.uint8] = flat.view(torch.uint8).numpy()
    return raw


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal dtype, shape and bits: signed zeros and NaN payloads count."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return bool(np.array_equal(bits(one), bits(other)))


def float64_of(tensor: Tensor) -> Float64:
    """The tensor's values in double, without rounding."""
    values: Any = tensor.detach().cpu().double().numpy()
    return np.asarray(values, dtype=np.float64)

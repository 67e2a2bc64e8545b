"""The norm's bound holds for every way torch takes a norm, and other numbers are beyond it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from fsdp_engine.contract.case import Dtype
from fsdp_engine.workload.models import TORCH_DTYPES
from oracles.arrays import float64_of
from oracles.norm import NormAllowance, exact_norm, norm_allowance, norm_mismatches

DTYPES: tuple[Dtype, ...] = ("float64", "float32", "bfloat16")
SIZES = (1, 7, 64, 500)


def gradients(dtype: Dtype, *, seed: int = 0, scale: float = 1.0) -> list[Tensor]:
    """Tensors of several sizes with numbers of mixed size; those of the last are all alike."""
    gen = torch.Generator().manual_seed(seed)
    drawn = [
        torch.randn(size, generator=gen, dtype=torch.float64)
        * 2.0 ** torch.randint(-9, 3, (size,), generator=gen)
        for size in SIZES
    ]
    drawn.append(torch.full((1000,), 1.1, dtype=torch.float64))
    return [(tensor * scale).to(TORCH_DTYPES[dtype]) for tensor in drawn]


def exact_of(tensors: list[Tensor]) -> float:
    return exact_norm({str(i): float64_of(tensor) for i, tensor in enumerate(tensors)})


def bound_of(tensors: list[Tensor], norm: Dtype, *, shards: int = 1) -> NormAllowance:
    largest = max(sum(chunk.numel() for chunk in rank) for rank in split(tensors, shards))
    return norm_allowance(num_elements=largest, num_tensors=len(tensors), shards=shards, norm=norm)


def split(tensors: list[Tensor], shards: int) -> list[list[Tensor]]:
    """Each rank's part of each tensor; parts may be empty."""
    parts = [torch.tensor_split(tensor, shards) for tensor in tensors]
    return [[part[rank] for part in parts] for rank in range(shards)]


def by_torch(tensors: list[Tensor]) -> Tensor:
    parameters = [torch.nn.Parameter(torch.zeros_like(tensor)) for tensor in tensors]
    for parameter, tensor in zip(parameters, tensors, strict=True):
        parameter.grad = tensor.clone()
    return torch.nn.utils.clip_grad_norm_(parameters, 1.0)


def as_fsdp1(tensors: list[Tensor], shards: int) -> Tensor:
    """Local norms in fp32, squares added over the ranks, handed back in the gradients' dtype."""
    total = torch.zeros(())
    for rank in split(tensors, shards):
        norms = [torch.linalg.vector_norm(part, dtype=torch.float32) for part in rank]
        total += torch.linalg.vector_norm(torch.stack(norms)) ** 2
    return (total**0.5).to(tensors[0].dtype)


def as_fsdp2(tensors: list[Tensor], shards: int) -> Tensor:
    """Norm of norms on every rank, squares added in the gradients' dtype."""
    total = torch.zeros((), dtype=tensors[0].dtype)
    for rank in split(tensors, shards):
        total += by_torch(rank) ** 2
    return total**0.5


def as_flat_double(tensors: list[Tensor], shards: int) -> Tensor:
    squares = [
        sum(part.double().square().sum() for part in rank) for rank in split(tensors, shards)
    ]
    return torch.tensor(math.sqrt(math.fsum(map(float, squares))), dtype=torch.float64)


@pytest.mark.parametrize("scale", [1.0, 2.0**-70, 2.0**-75, 2.0**60, 1e-3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shards", [1, 2, 3, 4])
def test_holds(dtype: Dtype, shards: int, scale: float) -> None:
    for seed in range(5):
        tensors = gradients(dtype, seed=seed, scale=scale)
        exact = exact_of(tensors)
        ways: list[tuple[Tensor, Dtype]] = [
            (as_fsdp2(tensors, shards), dtype),
            (as_flat_double(tensors, shards), "float64"),
        ]
        if dtype != "float64":
            ways.append((as_fsdp1(tensors, shards), dtype))
        if shards == 1:
            ways.append((by_torch(tensors), dtype))
        for got, norm in ways:
            bound = bound_of(tensors, norm, shards=shards)
            found, margin = norm_mismatches("norm", float(got), exact, bound)
            assert not found
            assert margin <= 1.0


def test_is_not_vacuous() -> None:
    """Six roundings in bf16; in fp32 what its sums may round, 5e-5 for 1500 elements."""
    limits: dict[Dtype, float] = {"float64": 1e-12, "float32": 1e-4, "bfloat16": 2.5e-2}
    for dtype, relative in limits.items():
        tensors = gradients(dtype)
        assert bound_of(tensors, dtype, shards=4).relative < relative
    few = norm_allowance(num_elements=8, num_tensors=2, shards=2, norm="float32")
    assert norm_mismatches("norm", 1.0 + 1e-6, 1.0, few)[0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_wrong_norms_are_found(dtype: Dtype) -> None:
    tensors = gradients(dtype)
    exact = exact_of(tensors)
    bound = bound_of(tensors, dtype, shards=2)
    local = split(tensors, 2)[0]
    wrong = {
        "of one rank's shards": exact_of(local),
        "without the root": exact**2,
        "a sum of norms": sum(exact_of([tensor]) for tensor in tensors),
        "the largest norm": max(exact_of([tensor]) for tensor in tensors),
        "without a tensor": exact_of(tensors[:-1]),
        "of replicas counted twice": exact * math.sqrt(2.0),
        "the largest element": max(float(tensor.abs().max()) for tensor in tensors),
        "after clipping": 1.0,
        "not finite": math.nan,
    }
    for name, norm in wrong.items():
        assert norm_mismatches("norm", norm, exact, bound)[0], name


def test_is_exact_at_any_scale() -> None:
    for exponent in (-1060, -500, 0, 500, 1020):
        scaled = np.ldexp(np.array([3.0, 4.0]), exponent)
        assert exact_norm({"w": scaled[:1], "b": scaled[1:]}) == math.ldexp(5.0, exponent)
    assert exact_norm({}) == 0.0


def test_a_square_may_overflow_in_the_declared_dtype_only() -> None:
    tensors = [torch.full((4,), 1e20)]
    assert float(by_torch(tensors)) == math.inf
    cases: tuple[tuple[Dtype, bool], ...] = (("float32", True), ("float64", False))
    for norm, legal in cases:
        bound = bound_of(tensors, norm)
        assert (not norm_mismatches("norm", math.inf, exact_of(tensors), bound)[0]) is legal


def test_non_finite_gradients_need_a_non_finite_norm() -> None:
    bound = bound_of(gradients("float32"), "float32")
    for element in (math.nan, math.inf, -math.inf):
        exact = exact_norm({"w": np.array([1.0, element])})
        assert not math.isfinite(exact)
        assert not norm_mismatches("norm", math.nan, exact, bound)[0]
        assert norm_mismatches("norm", 1.0, exact, bound)[0]


def test_an_error_of_the_gradient_is_allowed_in_norm() -> None:
    bound = bound_of(gradients("float64"), "float64")
    assert norm_mismatches("norm", 1.001, 1.0, bound)[0]
    assert not norm_mismatches("norm", 1.001, 1.0, bound, off_by=1e-2)[0]

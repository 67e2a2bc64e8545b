"""Clipped gradients as torch makes them are within the bound, and other factors are not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fsdp_engine.contract.case import Dtype
from fsdp_engine.workload.models import TORCH_DTYPES
from oracles.arrays import float64_of
from oracles.clipping import EPSILON, clip_factor, clipped
from oracles.findings import Findings
from oracles.trajectory import compare_bounded

DTYPES: tuple[Dtype, ...] = ("float64", "float32", "bfloat16")


def gradient(dtype: Dtype, *, scale: float = 1.0) -> Tensor:
    gen = torch.Generator().manual_seed(3)
    drawn = torch.randn(500, generator=gen, dtype=torch.float64)
    drawn *= 2.0 ** torch.randint(-20, 5, (500,), generator=gen)
    return (drawn * scale).to(TORCH_DTYPES[dtype])


def judged(
    got: Tensor, before: Tensor, norm: float, clip: float, dtype: Dtype, *, norm_dtype: Dtype
) -> Findings:
    findings = Findings()
    wanted = clipped(float64_of(before), clip_factor(norm, clip, norm_dtype), dtype)
    compare_bounded(findings, "w", got, wanted)
    return findings


def by_torch(before: Tensor, clip: float) -> tuple[Tensor, float]:
    parameter = torch.nn.Parameter(torch.zeros_like(before))
    parameter.grad = before.clone()
    norm = torch.nn.utils.clip_grad_norm_([parameter], clip)
    return parameter.grad, float(norm)


@pytest.mark.parametrize("clip", [1.0, 0.015625, 3.7, 1e-9, 400.0, 1e12])
@pytest.mark.parametrize("scale", [1.0, 1e-8, 1e-30, 1e10])
@pytest.mark.parametrize("dtype", DTYPES)
def test_holds(dtype: Dtype, scale: float, clip: float) -> None:
    before = gradient(dtype, scale=scale)
    after, norm = by_torch(before, clip)
    assert not judged(after, before, norm, clip, dtype, norm_dtype=dtype).mismatches
    in_double = before.clone()
    exact = float(before.double().norm())
    factor = min(1.0, clip / (exact + EPSILON))
    if factor < 1.0:
        in_double.mul_(factor)
    assert not judged(in_double, before, exact, clip, dtype, norm_dtype="float64").mismatches
    if dtype == "bfloat16":  # FSDP1: the norm in fp32, handed back in bf16
        single = torch.linalg.vector_norm(before, dtype=torch.float32)
        coefficient = torch.clamp(clip / (single + EPSILON), max=1.0).to(torch.bfloat16)
        handed = float(single.bfloat16())
        after = before * coefficient
        assert not judged(after, before, handed, clip, dtype, norm_dtype=dtype).mismatches


@pytest.mark.parametrize("dtype", DTYPES)
def test_where_nothing_is_clipped_every_bit_stays(dtype: Dtype) -> None:
    before = gradient(dtype)
    norm = float(before.double().norm())
    for clip in (2 * norm, 1e9):
        assert not judged(before, before, norm, clip, dtype, norm_dtype=dtype).mismatches
        changed = before.clone()
        changed[7] = torch.nextafter(changed[7], changed[7] * 2)
        assert judged(changed, before, norm, clip, dtype, norm_dtype=dtype).mismatches


def test_wrong_factors_are_found() -> None:
    before = gradient("float32")
    norm, clip = float(before.double().norm()), 1.0
    right = clip / (norm + EPSILON)
    wrong = {
        "not clipped": 1.0,
        "off by one millionth": right * (1 + 1e-6),
        "by the square": clip / norm**2,
        "twice": right**2,
        "by the world size": right / 2,
    }
    for name, factor in wrong.items():
        found = judged(before * factor, before, norm, clip, "float32", norm_dtype="float32")
        assert found.mismatches, name
    one = (before.double() * right).float()
    one[11] *= 1 + 1e-6
    assert judged(one, before, norm, clip, "float32", norm_dtype="float32").mismatches


def test_epsilon_is_seen_where_the_norm_is_small() -> None:
    """At a norm of 10 leaving it out changes 1e-7 of the factor, which fp32 may round."""
    for scale, seen in ((1e-3, True), (1.0, False)):
        before = gradient("float32", scale=scale)
        norm = float(before.double().norm())
        without = (before.double() * (0.01 * scale / norm)).float()
        clip = 0.01 * scale
        found = judged(without, before, norm, clip, "float32", norm_dtype="float32").mismatches
        assert bool(found) is seen

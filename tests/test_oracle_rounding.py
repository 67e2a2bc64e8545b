"""The bound holds on adversarial sums, is nearly attained, and needs each of its terms."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from fsdp_engine.contract.case import Dtype, Mesh
from fsdp_engine.contract.observation import Level, Numerics
from fsdp_engine.workload.models import TORCH_DTYPES
from oracles.compare import compare_with_replay
from oracles.reduction import contributions, deviation, emulate, magnitude
from oracles.replay import LocalGradients
from oracles.rounding import FORMATS, Allowance, allowance, gamma, holds

SIZE = 4096


def numerics(
    *,
    reduce: Dtype,
    compute: Dtype | None = None,
    storage: Dtype | None = None,
    shards: int = 2,
    average: bool = True,
) -> Numerics:
    """Eager numerics on one axis: an average, or the pair of divisions at 2 or 3 ranks."""
    before, after = (1.0, float(shards)) if average else (2.0, shards / 2)
    return Numerics(
        storage=storage or reduce,
        compute=compute or reduce,
        reduce=reduce,
        deferred=False,
        local_accumulate=compute or reduce,
        shard_accumulate=storage or reduce,
        norm="float32",
        levels=(Level(axis="shard", size=shards, before=before, after=after),),
        units=(),
    )


def locals_of(values: Tensor) -> LocalGradients:
    """`values` `[ranks, reductions, ...]` as replayed gradients of one parameter `w`."""
    reduced = tuple(tuple({"w": gradient} for gradient in rank) for rank in values)
    return LocalGradients(reduced=reduced, losses=(), used=())


def worst_margin(values: Tensor, declared: Numerics, bound: Allowance | None = None) -> float:
    """The worst error / allowed over all results that the declared levels can give."""
    ranks, steps, *shape = values.shape
    local = locals_of(values)
    candidates = emulate(local, "w", declared, Mesh(shape=(ranks,)))
    assert candidates
    terms = contributions(local, "w", tuple(shape))
    worst = 0.0
    for candidate in candidates:
        compared = compare_with_replay(
            candidate.double().numpy(),
            terms,
            allowance=bound or allowance(declared, steps),
            world_size=ranks,
            where="w",
        )
        worst = max(worst, compared.margin)
    return worst


def drawn(ranks: int, steps: int, dtype: Dtype, *, seed: int, scale: float = 1.0) -> Tensor:
    """Numbers of mixed size and sign."""
    gen = torch.Generator().manual_seed(seed)
    shape = (ranks, steps, SIZE)
    values = torch.randn(shape, generator=gen, dtype=torch.float64)
    exponents = torch.randint(-9, 3, shape, generator=gen)
    return (values * 2.0**exponents * scale).to(TORCH_DTYPES[dtype])


def rounding_up(ranks: int, steps: int, dtype: Dtype, final: Dtype) -> Tensor:
    """Positive numbers just above one whose sums round the same way again and again."""
    u = FORMATS[final].u
    gen = torch.Generator().manual_seed(0)
    values = 1.0 + u * (1.0 + torch.rand((ranks, steps, SIZE), generator=gen, dtype=torch.float64))
    return values.to(TORCH_DTYPES[dtype])


POLICIES: tuple[tuple[Dtype, Dtype, Dtype], ...] = (
    ("float64", "float64", "float64"),
    ("float32", "float32", "float32"),
    ("float32", "bfloat16", "float32"),
    ("float32", "bfloat16", "bfloat16"),
    ("bfloat16", "bfloat16", "float32"),
    ("float32", "float32", "bfloat16"),
    ("float16", "float16", "float16"),
    ("float16", "float16", "float32"),
)


@pytest.mark.parametrize("policy", POLICIES, ids="/".join)
@pytest.mark.parametrize(
    ("shards", "division"),
    [(1, "none"), (2, "average"), (3, "average"), (2, "around"), (3, "around")],
)
@pytest.mark.parametrize("steps", [1, 3])
def test_holds(policy: tuple[Dtype, Dtype, Dtype], shards: int, division: str, steps: int) -> None:
    storage, compute, reduce = policy
    declared = numerics(
        storage=storage,
        compute=compute,
        reduce=reduce,
        shards=shards,
        average=division == "average",
    )
    if division == "none":
        declared = replace(declared, levels=())
    scales = [1.0] if compute != "float16" else [1.0, 2.0**-15]  # the second is subnormal
    for seed, scale in itertools.product(range(2), scales):
        assert worst_margin(drawn(shards, steps, compute, seed=seed, scale=scale), declared) <= 1.0
    if compute != "float16":
        assert worst_margin(rounding_up(shards, steps, compute, storage), declared) <= 1.0


def test_is_nearly_attained() -> None:
    """Storage coarser than the reduction: a single rounding of the size the bound allows."""
    declared = numerics(storage="bfloat16", compute="bfloat16", reduce="float32")
    u = FORMATS["bfloat16"].u
    halfway = torch.tensor([[[1.0]], [[1.0 + 2 * u]]], dtype=torch.bfloat16)
    assert 0.99 < worst_margin(halfway, declared) <= 1.0


def test_each_term_is_needed() -> None:
    """Without a term some sum passes the bound; with it none does."""
    coarse = numerics(storage="bfloat16", compute="bfloat16", reduce="float32")
    values = drawn(2, 1, "bfloat16", seed=5)
    no_storage = allowance(replace(coarse, shard_accumulate="float32"), 1)
    assert worst_margin(values, coarse) <= 1.0 < worst_margin(values, coarse, no_storage)

    finer = numerics(storage="float32", compute="float32", reduce="bfloat16")
    values = drawn(2, 1, "float32", seed=5)
    no_cast = allowance(replace(finer, compute="bfloat16"), 1)
    assert worst_margin(values, finer) <= 1.0 < worst_margin(values, finer, no_cast)

    tiny = numerics(reduce="float16", average=False)
    values = drawn(2, 1, "float16", seed=5, scale=2.0**-15)
    no_underflow = replace(allowance(tiny, 1), absolute=0.0)
    assert worst_margin(values, tiny) <= 1.0 < worst_margin(values, tiny, no_underflow)

    eager = numerics(reduce="bfloat16")
    values = drawn(2, 8, "bfloat16", seed=5).abs()
    one_step = replace(allowance(eager, 1), absolute=0.0)
    assert worst_margin(values, eager) <= 1.0 < worst_margin(values, eager, one_step)


def test_one_rank_and_one_reduction_allow_nothing() -> None:
    alone = allowance(replace(numerics(reduce="float32"), levels=()), 1)
    assert (alone.relative, alone.absolute) == (0.0, 0.0)
    got = np.array([0.0, 1.0])
    terms = np.array([[-0.0, 1.0]])
    compared = compare_with_replay(got, terms, allowance=alone, world_size=1, where="w")
    assert compared.mismatch is not None  # the sign of a zero that is handed through counts
    assert "[0]" in compared.mismatch.where


@pytest.mark.parametrize("dtype", list(FORMATS))
def test_formats_are_torch_s_own(dtype: Dtype) -> None:
    info, ours = torch.finfo(TORCH_DTYPES[dtype]), FORMATS[dtype]
    assert 2 * ours.u == info.eps
    assert ours.largest == info.max
    assert ours.eta == info.smallest_normal * info.eps


def test_what_holds_what() -> None:
    assert holds("float32", "bfloat16")
    assert holds("float32", "float16")
    assert holds("bfloat16", "bfloat16")
    assert not holds("bfloat16", "float16")
    assert not holds("float16", "bfloat16")
    assert not holds("float32", "float64")


def test_gamma_bounds_products() -> None:
    u = FORMATS["bfloat16"].u
    assert gamma(0, u) == 0.0
    for n in range(1, 20):
        assert (1 + u) ** n - 1 <= gamma(n, u)


def test_non_finite_values_are_judged_apart() -> None:
    declared = numerics(reduce="float32")
    bound = allowance(declared, 1)
    terms = np.array([[np.nan, np.inf, 1.0, np.inf, 3e38], [1.0, 1.0, 1.0, -np.inf, 3e38]])
    good = np.array([np.nan, np.inf, 1.0, np.nan, np.inf])

    def complaint(got: np.ndarray) -> str:
        compared = compare_with_replay(got, terms, allowance=bound, world_size=2, where="w")
        return str(compared.mismatch) if compared.mismatch else ""

    assert complaint(good) == ""
    for index, wrong in enumerate([1.0, -np.inf, np.nan, np.inf]):
        changed = good.copy()
        changed[index] = wrong
        assert f"w[{index}]" in complaint(changed)


def test_deviation_is_exact_where_everything_cancels() -> None:
    terms = np.array([[1.0], [2.0**-60], [-1.0]])
    got = np.array([2.0**-60 / 3])
    assert abs(deviation(got, terms, 3)[0]) < 2.0**-112
    assert magnitude(terms, 3)[0] >= (2.0 + 2.0**-60) / 3

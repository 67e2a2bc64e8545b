"""The bound in exact fractions on sums made to round badly, and on sums that are merely random."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from fsdp_engine.contract.case import Dtype, Mesh
from fsdp_engine.workload.models import TORCH_DTYPES
from oracles.reduction import contributions, deviation, emulate, magnitude
from oracles.rounding import FORMATS, allowance
from tests.test_oracle_rounding import POLICIES, drawn, locals_of, numerics, worst_margin

COLUMNS = 12
"""Elements per pattern; each is a sum of its own."""

Pattern = Callable[[int, Dtype, torch.Generator], Tensor]
"""`(addends, dtype, generator) -> [addends, COLUMNS]` in double, numbers of the dtype."""


def _random(count: int, gen: torch.Generator) -> Tensor:
    return torch.randn((count, COLUMNS), generator=gen, dtype=torch.float64)


def _ascending(count: int, _: Dtype, gen: torch.Generator) -> Tensor:
    return (_random(count, gen).abs() * 4.0 ** torch.arange(count)[:, None]).sort(0).values


def _descending(count: int, dtype: Dtype, gen: torch.Generator) -> Tensor:
    return _ascending(count, dtype, gen).flip(0)


def _alternating(count: int, dtype: Dtype, gen: torch.Generator) -> Tensor:
    """Signs by turns, each addend an ulp or so larger than the one before."""
    steps = torch.arange(count)[:, None] * 3.0 * FORMATS[dtype].u
    return (1.0 + steps + _random(count, gen).abs() * FORMATS[dtype].u) * (-1.0) ** torch.arange(
        count
    )[:, None]


def _cancelling(count: int, dtype: Dtype, gen: torch.Generator) -> Tensor:
    """Large numbers that cancel but for a few units in the last place of small ones."""
    values = _random(count, gen) * FORMATS[dtype].u * 8.0
    large = _random(1, gen)[0] + 3.0
    values[0] += large
    values[-1] -= large
    return values


def _swallowed(count: int, dtype: Dtype, gen: torch.Generator) -> Tensor:
    """One plus half an ulp each time: round to even loses every addend but the first."""
    values = torch.full((count, COLUMNS), FORMATS[dtype].u, dtype=torch.float64)
    values[torch.randint(count, (), generator=gen)] = 1.0
    return values


def _powers_of_two(count: int, dtype: Dtype, gen: torch.Generator) -> Tensor:
    digits = FORMATS[dtype].digits
    exponents = torch.randint(-digits - 1, 1, (count, COLUMNS), generator=gen)
    signs = torch.randint(0, 2, (count, COLUMNS), generator=gen) * 2.0 - 1.0
    return signs.double() * 2.0 ** exponents.double()


def _subnormal(count: int, dtype: Dtype, gen: torch.Generator) -> Tensor:
    """Odd multiples of the smallest number there is: every division rounds."""
    whole = torch.randint(-40, 40, (count, COLUMNS), generator=gen) * 2 + 1
    return whole.double() * FORMATS[dtype].eta


PATTERNS: tuple[Pattern, ...] = (
    _ascending, _descending, _alternating, _cancelling, _swallowed, _powers_of_two, _subnormal,
)  # fmt: skip


@pytest.mark.parametrize("policy", POLICIES, ids="/".join)
@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.__name__[1:])
def test_no_sum_passes_the_bound(pattern: Pattern, policy: tuple[Dtype, Dtype, Dtype]) -> None:
    """Exact numbers throughout: neither the error nor the bound is computed in floating point."""
    storage, compute, reduce = policy
    for ranks, steps, average in ((2, 1, True), (2, 3, True), (3, 1, False), (3, 2, True)):
        gen = torch.Generator().manual_seed(ranks * steps)
        addends = pattern(ranks * steps, compute, gen).to(TORCH_DTYPES[compute])
        values = addends.reshape(ranks, steps, COLUMNS)
        declared = numerics(
            storage=storage, compute=compute, reduce=reduce, shards=ranks, average=average
        )
        bound = allowance(declared, steps)
        relative, absolute = Fraction(bound.relative), Fraction(bound.absolute)
        results = emulate(locals_of(values), "w", declared, Mesh(shape=(ranks,)))
        assert results
        for column in range(COLUMNS):
            terms = [Fraction(float(term)) for term in values[:, :, column].flatten()]
            mean = sum(terms, Fraction(0)) / ranks
            size = sum(map(abs, terms), Fraction(0)) / ranks
            for got in {float(result[column]) for result in results}:
                assert abs(Fraction(got) - mean) <= relative * size + absolute
        assert worst_margin(values, declared) <= 1.0


def test_the_patterns_round() -> None:
    """Every pattern has a sum that comes near its bound, so that the test above is one."""
    for pattern in PATTERNS:
        worst = 0.0
        for dtype in ("float32", "bfloat16", "float16"):
            gen = torch.Generator().manual_seed(6)
            addends = pattern(6, dtype, gen).to(TORCH_DTYPES[dtype]).reshape(3, 2, COLUMNS)
            declared = numerics(reduce=dtype, shards=3, average=pattern is not _subnormal)
            worst = max(worst, worst_margin(addends, declared))
        assert worst > 0.05, pattern.__name__


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("steps", [1, 2, 8])
def test_the_bound_is_not_vacuous(ranks: int, steps: int) -> None:
    """Random float32 data, sums in order: the median error is no thousandth of what is allowed."""
    declared = numerics(reduce="float32", shards=ranks)
    values = drawn(ranks, steps, "float32", seed=ranks)
    terms = contributions(locals_of(values), "w", tuple(values.shape[2:]))
    got = torch.zeros(values.shape[2:])
    for step in range(steps):
        total = torch.zeros(values.shape[2:])
        for rank in range(ranks):
            total += values[rank, step]
        got += total / ranks
    allowed = allowance(declared, steps).allowed(magnitude(terms, ranks))
    margins = np.abs(deviation(got.double().numpy(), terms, ranks)) / allowed
    assert float(np.median(margins)) > 1e-3
    assert float(margins.max()) <= 1.0

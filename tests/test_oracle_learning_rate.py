"""The schedule's closed form against torch's own schedulers, and what is beyond its bound."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from fsdp_engine.contract.case import Optimizer
from oracles.learning_rate import learning_rate, rate_mismatches

CONSTANT = Optimizer(lr=0.1, warmup_steps=3)
COSINE = Optimizer(lr=0.003, warmup_steps=2, schedule="cosine", total_steps=11, min_lr_ratio=0.1)
NO_WARMUP = replace(COSINE, warmup_steps=0, min_lr_ratio=0.0)
ALL = (CONSTANT, COSINE, NO_WARMUP)


def rates(options: Optimizer, factor: Callable[[int], float], count: int) -> list[float]:
    """What LambdaLR gives, step after step."""
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=options.lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(sgd, factor)
    shown = []
    for _ in range(count):
        shown.append(float(schedule.get_last_lr()[0]))
        sgd.step()
        schedule.step()
    return shown


def by_definition(options: Optimizer) -> Callable[[int], float]:
    low, warmup = options.min_lr_ratio, options.warmup_steps

    def factor(step: int) -> float:
        if step < warmup:
            return step / warmup
        if options.schedule == "constant":
            return 1.0
        done = (step - warmup) / max(1, options.total_steps - warmup)
        return max(low, (1 + low) / 2 + (1 - low) / 2 * math.cos(math.pi * done))

    return factor


def half_a_wave(options: Optimizer) -> Callable[[int], float]:
    """The same cosine, written as others do."""
    low, warmup = options.min_lr_ratio, options.warmup_steps

    def factor(step: int) -> float:
        if step < warmup:
            return float(step) * (1.0 / warmup)
        if options.schedule == "constant":
            return 1.0
        done = float(step - warmup) / float(max(1, options.total_steps - warmup))
        return max(low, low + (1.0 - low) * 0.5 * (1.0 + math.cos(math.pi * 0.5 * 2.0 * done)))

    return factor


@pytest.mark.parametrize("options", ALL, ids=["constant", "cosine", "no warmup"])
@pytest.mark.parametrize("formula", [by_definition, half_a_wave])
def test_holds(options: Optimizer, formula: Callable[[Optimizer], Callable[[int], float]]) -> None:
    for steps, got in enumerate(rates(options, formula(options), 20)):
        found, margin = rate_mismatches("lr", [got, got], options, steps)
        assert not found
        assert margin <= 1.0


def test_cosine_of_torch() -> None:
    options = replace(NO_WARMUP, total_steps=9)
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=options.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(sgd, T_max=9)
    for steps in range(9):
        wanted = learning_rate(options, steps)
        # torch's is recursive: its errors add up.
        assert abs(schedule.get_last_lr()[0] - wanted.value) <= 20 * wanted.error
        sgd.step()
        schedule.step()


def test_ends_are_exact() -> None:
    for steps in (3, 4, 100):
        wanted = learning_rate(CONSTANT, steps)
        assert (float(wanted.value), float(wanted.error)) == (0.1, 0.0)
    first = learning_rate(CONSTANT, 0)
    assert (float(first.value), float(first.error)) == (0.0, 0.0)
    assert learning_rate(COSINE, 2).value == 0.003
    assert learning_rate(NO_WARMUP, 11).value == 0.0


def test_allowed_are_a_few_units_in_the_last_place() -> None:
    for options, steps in itertools.product(ALL, range(1, 12)):
        assert learning_rate(options, steps).error <= 32 * options.lr * 2.0**-53


def test_wrong_rates_are_found() -> None:
    for options in ALL:
        for steps in range(1, 9):
            right = float(learning_rate(options, steps).value)
            found, _ = rate_mismatches("lr", [right * (1 + 1e-12)], options, steps)
            assert found
            next_one = float(learning_rate(options, steps + 1).value)
            if next_one != right:
                assert rate_mismatches("lr", [next_one], options, steps)[0]
    assert rate_mismatches("lr", [None], CONSTANT, 1)[0]
    assert rate_mismatches("lr", [math.nan], CONSTANT, 1)[0]


def test_ranks_that_differ_are_found() -> None:
    right = float(learning_rate(COSINE, 5).value)
    near = math.nextafter(right, 1.0)
    assert not rate_mismatches("lr", [near, near], COSINE, 5)[0]
    found, _ = rate_mismatches("lr", [right, near], COSINE, 5)
    assert "as on rank 0" in found[0].wanted

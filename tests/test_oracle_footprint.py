"""Peaks by hand, and what the meter counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fsdp_engine.contract.case import Case, Strategy
from fsdp_engine.contract.model import Model
from oracles.footprint import Footprint, Meter, footprints
from tests.observed import numerics_of
from tests.small_cases import small_case


def _footprints(case: Case) -> tuple[Footprint, ...]:
    plan = tuple((index,) for index in range(len(case.batches[0].ranks[0])))
    return footprints(case, numerics_of(case), batch=0, rank=0, plan=plan, first=True)


def test_the_meter_counts_what_is_held() -> None:
    before = torch.ones(8)
    with Meter() as meter:
        meter.ignore([before])
        kept = before * 2
        view = kept[2:]
        (before + kept).sum()
        assert meter.take_peak() == 32 + 32 + 4
        del kept
        assert meter.take_peak() == 32  # the view holds all of it
        del view
        meter.take_peak()
        assert meter.take_peak() == 0


def test_what_autograd_saves_is_held_until_the_backward() -> None:
    weight = torch.ones(8, requires_grad=True)
    with Meter() as meter:
        meter.ignore([weight])
        total = (weight * 2).exp().sum()
        meter.take_peak()
        assert meter.take_peak() == 32 + 4
        total.backward()  # type: ignore[no-untyped-call]  # so in torch
        meter.take_peak()
        assert meter.take_peak() == 32 + 4


def _linear(strategy: Strategy, *, units: int = 1, deferred: bool = False) -> Case:
    """Units and root of 4 by 4 elements, 64 bytes each; a first sequence of 2 tokens."""
    model = Model(family="linear", units=units)
    return small_case(shape=(2,), model=model, strategy=strategy, deferred=deferred)


MICRO_BATCH = 2 * (16 + 16 + 1) + 1
"""Features, targets and the mask of two tokens, and the gate of their sequence."""


def test_fsdp2_keeps_an_all_gather_until_the_next_one_is_copied_out() -> None:
    found = _footprints(_linear("fsdp2"))
    # The root in full and as it was gathered, and the unit as it is gathered and copied out.
    assert found[0].forward == 4 * 64 + MICRO_BATCH


def test_fsdp1_gathers_in_place() -> None:
    found = _footprints(_linear("fsdp1"))
    # Both units in full; the unit's product and its relu, and the root's product.
    assert found[0].forward == 2 * 64 + MICRO_BATCH + 3 * 32 - 32


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_deferral_adds_the_gradients_that_wait(strategy: Strategy) -> None:
    eager, deferred = _footprints(_linear(strategy)), _footprints(_linear(strategy, deferred=True))
    assert deferred[0].forward == eager[0].forward
    # In full instead of the shard of each.
    assert deferred[1].forward - eager[1].forward == 2 * (64 - 32)


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_zero3_frees_units_in_between_and_zero2_keeps_them(strategy: Strategy) -> None:
    zero3 = _linear(strategy, units=6)
    zero2 = replace(zero3, engine=replace(zero3.engine, reshard_after_forward=False))
    freed = _footprints(zero2)[0].forward - _footprints(zero3)[0].forward
    assert freed == 5 * 64

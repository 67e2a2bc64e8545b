"""A program with steps, and all that can be spoilt in what it shows: what, where, who says so."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from fsdp_engine.contract.actions import Poison, Train
from fsdp_engine.contract.batch import Batch, Sequence
from fsdp_engine.contract.case import Case, EngineOptions, Mesh, Optimizer
from fsdp_engine.contract.model import Model
from fsdp_engine.contract.observation import LocalArray
from oracles.arrays import array_of, tensor_of
from properties.catalog import Check
from properties.checks.non_finite import changes_nothing
from properties.checks.step import learning_rates, norm_and_clip, optimizer_step

CHECKS: tuple[Check, ...] = (
    norm_and_clip,
    optimizer_step,
    learning_rates,
    changes_nothing,
)
Change = Callable[[Any], Any]


def batch(first_key: int) -> Batch:
    keys = range(first_key, first_key + 4)
    sequences = [Sequence(key=key, length=3, loss_tokens=1 + key % 3) for key in keys]
    return Batch(ranks=(tuple(sequences[:2]), tuple(sequences[2:])))


CASE = Case(
    mesh=Mesh(shape=(2,)),
    model=Model(family="mlp", width=4, hidden=6, vocab=5, bias=True, frozen="biases"),
    engine=EngineOptions(strategy="fsdp2"),
    optimizer=Optimizer(
        kind="adamw", lr=0.125, weight_decay=0.0625, clip_grad=0.25, warmup_steps=1
    ),
    batches=(batch(0), batch(10)),
    program=(
        Train(step=True),
        Train(batch=1, step=True),
        Poison(rank=1, sequence=1),
        Train(step=True),
    ),
)
POISONED = CASE.program.index(Poison(rank=1, sequence=1))
LAST = len(CASE.program) - 1


def scaled(part: LocalArray, factor: float) -> LocalArray:
    if part.data is None:
        return part
    return replace(part, data=array_of(tensor_of(part.data) * factor))


def of(field: str, change: Callable[[LocalArray], LocalArray], *, only: str = "") -> Change:
    """A change of every part, or of one parameter's, in a field of a record."""

    def changed(record: Any) -> Any:
        parts = getattr(record, field)
        one_by_one = tuple(change(part) if only in part.name else part for part in parts)
        return replace(record, **{field: one_by_one})

    return changed


def of_state(slot: str, change: Callable[[LocalArray], LocalArray]) -> Change:
    def changed(record: Any) -> Any:
        state = dict(record.optimizer_state)
        state[slot] = tuple(map(change, state[slot]))
        return replace(record, optimizer_state=state)

    return changed


def ones(part: LocalArray) -> LocalArray:
    """A gradient where there is none."""
    if part.data is not None:
        return part
    placement: Any = part.placement
    shape = (placement.length, *part.full_shape[1:])
    return replace(part, data=array_of(torch.ones(shape)))


SPOILT: list[tuple[str, Check, int, Change, str]] = [
    ("norm", norm_and_clip, 0, lambda r: replace(r, norm=r.norm * (1 + 1e-9)), "norm"),
    ("norm after clipping", norm_and_clip, 0, lambda r: replace(r, norm=0.25), "norm"),
    ("norm not finite", norm_and_clip, 0, lambda r: replace(r, norm=math.nan), "norm"),
    ("no step", norm_and_clip, 0, lambda r: replace(r, stepped=False), "rank 0"),
    ("not clipped", norm_and_clip, 1, lambda r: replace(r, clipped=r.gradients), "clipped"),
    ("clipped away", norm_and_clip, 1, lambda r: replace(r, clipped=r.gradients[:0]), "clipped"),
    ("clip factor", norm_and_clip, 1, of("clipped", lambda p: scaled(p, 1 + 1e-6)), "clipped"),
    ("a frozen gradient", norm_and_clip, 1, of("gradients", ones), "bias"),
    ("a gradient from clipping", norm_and_clip, 1, of("clipped", ones), "absent as before"),
    (
        "other gradients",
        norm_and_clip,
        0,
        of("gradients", lambda p: scaled(p, 1.01)),
        "norm",
    ),
    ("poisoned norm", norm_and_clip, POISONED, lambda r: replace(r, norm=1.0), "norm"),
    (
        "a parameter",
        optimizer_step,
        1,
        of("parameters", lambda p: scaled(p, 1 + 1e-6), only="up.weight"),
        "parameter layers.0.up.weight",
    ),
    (
        "a frozen parameter",
        optimizer_step,
        1,
        of("parameters", lambda p: scaled(p, 1 + 1e-6), only="up.bias"),
        "parameter layers.0.up.bias",
    ),
    ("first moment", optimizer_step, 1, of_state("exp_avg", lambda p: scaled(p, 1.01)), "exp_avg "),
    (
        "second moment",
        optimizer_step,
        1,
        of_state("exp_avg_sq", lambda p: scaled(p, 1 + 1e-6)),
        "exp_avg_sq",
    ),
    ("step counter", optimizer_step, 1, of_state("step", lambda p: scaled(p, 2.0)), "step counter"),
    (
        "a moved parameter at a non-finite norm",
        optimizer_step,
        POISONED,
        of("parameters", lambda p: scaled(p, 1 + 1e-6)),
        "parameter",
    ),
    ("rate", learning_rates, 1, lambda r: replace(r, lr=r.lr * (1 + 1e-15)), "learning rate"),
    ("rate of this step", learning_rates, 0, lambda r: replace(r, lr=0.0), "learning rate"),
    ("rate left out", learning_rates, POISONED, lambda r: replace(r, lr=None), "learning rate"),
    (
        "finite norm",
        changes_nothing,
        POISONED,
        lambda r: replace(r, norm=1.0),
        "norm",
    ),
    (
        "a step",
        changes_nothing,
        POISONED,
        lambda r: replace(r, stepped=True),
        "rank 0",
    ),
    (
        "gradients left",
        changes_nothing,
        POISONED,
        lambda r: replace(r, clipped=r.gradients),
        "gradient",
    ),
    (
        "parameters moved",
        changes_nothing,
        POISONED,
        of("parameters", lambda p: scaled(p, -1.0)),
        "parameter",
    ),
    (
        "moments moved",
        changes_nothing,
        POISONED,
        of_state("exp_avg", lambda p: scaled(p, 0.9)),
        "exp_avg",
    ),
    (
        "counter moved",
        changes_nothing,
        POISONED,
        of_state("step", lambda p: scaled(p, 1.5)),
        "step",
    ),
    (
        "schedule stood still",
        changes_nothing,
        POISONED,
        lambda r: replace(r, lr=0.0),
        "learning rate",
    ),
    (
        "gradients of the next batch",
        changes_nothing,
        LAST,
        of("gradients", lambda p: scaled(p, 1 + 2.0**-23)),
        "against the program without poisoned actions",
    ),
    (
        "state of the next step",
        changes_nothing,
        LAST,
        of_state("exp_avg_sq", lambda p: scaled(p, 1 + 2.0**-23)),
        "against the program without poisoned actions",
    ),
]

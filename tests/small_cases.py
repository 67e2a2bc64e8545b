"""Small cases in which every rank and micro-batch has data and token counts of its own."""

from __future__ import annotations

from typing import Any

from fsdp_engine.contract import actions, batch, case, model
from fsdp_engine.contract.actions import Train
from fsdp_engine.contract.batch import Batch, Sequence, Static
from fsdp_engine.contract.case import (
    DTYPE_POLICIES,
    Case,
    EngineOptions,
    LossMode,
    Mesh,
    Strategy,
)
from fsdp_engine.contract.model import Model

CASE_NAMES: dict[str, Any] = vars(actions) | vars(batch) | vars(model) | vars(case)
"""What the source of a case is made of."""


def small_case(
    *,
    shape: tuple[int, ...],
    model: Model,
    policy: str = "fp32",
    micro_batches: int = 2,
    deferred: bool = False,
    strategy: Strategy = "fsdp2",
    loss_mode: LossMode = "token-mean",
) -> Case:
    """One train action; sequences of length 2 to 5, 1 to 2 of their tokens with loss."""
    mesh = Mesh(shape=shape)
    ranks = tuple(
        tuple(
            Sequence(key=key, length=2 + key % 4, loss_tokens=1 + key % 2)
            for key in range(rank * micro_batches, (rank + 1) * micro_batches)
        )
        for rank in range(mesh.world_size)
    )
    return Case(
        mesh=mesh,
        model=model,
        dtypes=DTYPE_POLICIES[policy],
        engine=EngineOptions(
            strategy=strategy,
            deferred=deferred,
            planning=Static(sequences=1),
            loss_mode=loss_mode,
        ),
        batches=(Batch(ranks=ranks),),
        program=(Train(),),
        seed=11,
    )


def exact_case(*, shape: tuple[int, ...], model: Model, policy: str = "fp32") -> Case:
    """A dyadic case: one micro-batch; every count and the number of loss tokens a power of two."""
    mesh = Mesh(shape=shape)
    counts = [1] * mesh.world_size
    total = 1 << mesh.world_size.bit_length()
    while sum(counts) < total:
        last = max(i for i, count in enumerate(counts) if sum(counts) + count <= total)
        counts[last] *= 2
    ranks = tuple(
        (Sequence(key=rank, length=max(2, count), loss_tokens=count),)
        for rank, count in enumerate(counts)
    )
    return Case(
        mesh=mesh,
        model=model,
        dtypes=DTYPE_POLICIES[policy],
        batches=(Batch(ranks=ranks),),
        exact=True,
        seed=3,
    )

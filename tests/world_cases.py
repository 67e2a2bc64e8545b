"""Cases for the tests of worlds and torch adapters, on meshes of real ranks."""

from __future__ import annotations

from typing import Any

from fsdp_engine.contract.case import Batch, Case, EngineOptions, Mesh, Sequence, Strategy
from fsdp_engine.contract.model import Model

ROOT_AND_TWO_UNITS = Model(family="embedding", units=2, width=8, hidden=12, vocab=61, bias=True)
"""1461 parameters: 212 in each of two units, 1037 in the root."""


def world_case(
    strategy: Strategy = "fsdp2",
    *,
    mesh: tuple[int, ...] = (2,),
    micro_batches: int = 2,
    reshard_after_forward: bool = True,
    deferred: bool = False,
    **fields: Any,
) -> Case:
    """A case with one sequence per micro-batch; no two sequences are alike."""
    shape = Mesh(shape=mesh)
    ranks = tuple(
        tuple(
            Sequence(key=100 * rank + number, length=2 + (rank + number) % 3, loss_tokens=1)
            for number in range(micro_batches)
        )
        for rank in range(shape.world_size)
    )
    options = EngineOptions(
        strategy=strategy, reshard_after_forward=reshard_after_forward, deferred=deferred
    )
    return Case(mesh=shape, batches=(Batch(ranks=ranks),), **({"engine": options} | fields))

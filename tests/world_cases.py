"""Cases for the tests of worlds and torch adapters, and a look at a pool's rank processes."""

from __future__ import annotations

import os
import select
from typing import Any

import pytest

from fsdp_engine.contract.batch import Batch, Sequence
from fsdp_engine.contract.case import Case, EngineOptions, Mesh, Strategy
from fsdp_engine.contract.errors import AcceleratorError
from fsdp_engine.contract.model import Model
from fsdp_engine.world.pool import WorldPool

ROOT_AND_TWO_UNITS = Model(family="embedding", units=2, width=8, hidden=12, vocab=61, bias=True)
"""1461 parameters: 212 in each of two units, 1037 in the root."""


LONG_S = 60.0


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


def pids_of(pool: WorldPool) -> list[int]:
    assert pool._warm is not None
    return [rank.pid for rank in pool._warm._ranks]


def wait_until_gone(pids: list[int]) -> None:
    """Return when no process has these ids; fail where one is left after a long time."""
    for pid in pids:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        ended, _, _ = select.select([handle], [], [], LONG_S)
        os.close(handle)
        assert ended, f"process {pid} is left"


def skip_without_device(pool: WorldPool) -> None:
    """Skip the test where the pool's device cannot be had on this machine."""
    try:
        pool.tables()
    except AcceleratorError as error:
        pytest.skip(str(error))

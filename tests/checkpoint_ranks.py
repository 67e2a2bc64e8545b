"""Ranks that save and load: real processes, forked from a server that has imported torch."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_engine.adapters.reference import Reference
from fsdp_engine.contract.case import Case
from fsdp_engine.contract.protocol import RankContext
from fsdp_engine.engine.agreement import gathered
from fsdp_engine.engine.checkpoint_plan import interval_of
from fsdp_engine.engine.engine import FsdpEngine
from fsdp_engine.workload.batches import local_batch
from fsdp_engine.workload.losses import token_loss

State: TypeAlias = dict[str, list[float]]
"""Full tensors as lists, by key; the learning rate as `lr`."""

Job: TypeAlias = Callable[..., Any]
"""Runs on every rank, inside a process group of all."""

Place: TypeAlias = tuple[int, int, str]
"""Rank, number of ranks, path of the store."""

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.checkpoint_ranks", "torch._dynamo", "safetensors.torch"])


def on_ranks(world_size: int, job: Job, *arguments: Any) -> list[Any]:
    """What `job(*arguments)` returns on each rank; None where a rank was killed.

    When one rank ends by a signal the others are killed too.
    """
    with tempfile.TemporaryDirectory(prefix="fsdp-ranks-") as folder:
        started = []
        for rank in range(world_size):
            mine, its = _FORKS.Pipe(duplex=False)
            place = (rank, world_size, f"{folder}/store")
            process = _FORKS.Process(target=_serve, args=(its, place, job, arguments))
            process.start()
            its.close()
            started.append((process, mine))
        try:
            return _collect(started)
        finally:
            for process, mine in started:
                process.kill()
                process.join()
                mine.close()


def _collect(started: list[tuple[Any, Any]]) -> list[Any]:
    """Until every rank has answered or one was killed: the errors of the others come of that."""
    results: list[Any] = [None] * len(started)
    errors: list[str] = []
    waiting: dict[Any, int] = {mine: rank for rank, (_, mine) in enumerate(started)}
    while waiting:
        ready: list[Any] = multiprocessing.connection.wait(list(waiting), timeout=60.0)
        assert ready, f"no answer from ranks {sorted(waiting.values())}, {errors}"
        for mine in ready:
            rank = waiting.pop(mine)
            try:
                error, results[rank] = mine.recv()
            except EOFError:
                process = started[rank][0]
                process.join()
                if process.exitcode == -signal.SIGKILL:
                    return results
                error = f"rank {rank}: exit code {process.exitcode}"
            errors += [error] if error else []
    assert not errors, errors
    return results


def _serve(result: Any, place: Place, job: Job, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of torch's deprecations
    rank, world_size, store = place
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size
    )
    dist.barrier()  # a rank that is done at once must not leave others connecting
    try:
        result.send(("", job(*arguments)))
    except Exception as error:  # noqa: BLE001  a test tells it
        result.send((f"rank {rank}: {type(error).__name__}: {error}", None))
    dist.destroy_process_group()


def built(case: Case) -> FsdpEngine:
    """The reference engine for a case."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return Reference().build(case, RankContext(rank=rank, world_size=size))


def step(engine: FsdpEngine, case: Case) -> tuple[float, float, float]:
    """One step over the case's first batch: loss, norm, learning rate of the next step."""
    with engine.mode("train"):
        losses = engine.forward_backward(local_batch(case, 0, dist.get_rank()), token_loss(case))
        norm = engine.step().norm
        return losses.total, norm, engine.lr_step()


def local_state(engine: FsdpEngine) -> dict[str, Tensor]:
    """Copies of what this rank holds, optimizer state and random numbers included."""
    state = {shard.name: shard.data for shard in engine.parameters()}
    state |= {f"{slot} {shard.name}": shard.data for slot, shard in engine.optimizer_state()}
    state |= dict(engine.module.named_buffers())
    state["random"] = torch.get_rng_state()
    return {name: data.detach().clone() for name, data in state.items() if data is not None}


def full_state(engine: FsdpEngine) -> State:
    """Full parameters and optimizer state, put together from all ranks. A collective call."""
    parts: list[tuple[str, int, int, list[float]]] = []
    shards = [("", shard) for shard in engine.parameters()]
    for slot, shard in [*shards, *engine.optimizer_state()]:
        if shard.data is not None:
            interval = interval_of(shard, shard.data)
            values = interval.data.double().tolist()
            parts.append((f"{slot} {shard.name}", interval.size, interval.start, values))
    full: State = {}
    for rank in gathered(parts):
        for key, size, start, values in rank:
            full.setdefault(key, [float("nan")] * size)[start : start + len(values)] = values
    optimization = engine._optimization
    if optimization is not None:
        full["lr"] = [float(group["lr"]) for group in optimization._optimizer.param_groups]
    return full


class Killer:
    """Ends this process before its file operation number `at` below `root`, counted from 0."""

    def __init__(self, root: Path, at: int) -> None:
        self.count = 0
        self._root = str(root)
        self._at = at
        self._fsync = os.fsync

    def arm(self) -> None:
        """Watch from now on, for the rest of the process."""
        sys.addaudithook(self._audit)
        os.fsync = self._counted_fsync  # type: ignore[assignment]  # of descriptors alone

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event.partition(".")[0] not in ("open", "os", "shutil") or not arguments:
            return
        path = arguments[0]
        if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(self._root):
            self._tick()

    def _counted_fsync(self, descriptor: int) -> None:
        self._tick()
        self._fsync(descriptor)
        self._tick()

    def _tick(self) -> None:
        if self.count == self._at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.count += 1

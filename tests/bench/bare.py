"""The bare loop: `python -m tests.bench.bare WORLD_SIZE`, then lines `group N` or `standing N`.

Rank processes are forked from one that has imported everything, as the harness does it, and do what
a case is about on plain FSDP2: build, forward and backward over the micro-batches, and a copy of
the initial parameters and of the gradients. There is no driver, no recorder (no interception of
collectives, no sampling of memory), no encoding and no controller. `group` makes and leaves a
process group for every case, as isolation asks; `standing` uses one for all.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_engine.adapters.torch_fsdp import TorchFsdp2
from fsdp_engine.contract.case import Case
from fsdp_engine.contract.protocol import LocalShard, RankContext
from fsdp_engine.torch_private.shards import gradient_shards, parameter_shards
from fsdp_engine.workload.batches import local_batch
from fsdp_engine.workload.losses import token_loss
from tests.bench.typical import typical_case

Copies = list[tuple[str, Tensor | None]]


def main(world_size: int) -> None:
    """Fork the ranks, pass every line of the input on to all, say when all are done."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    with tempfile.TemporaryDirectory(prefix="fsdp-bare-") as folder:
        ranks = [_fork(Path(folder), rank, world_size) for rank in range(world_size)]
        for line in sys.stdin:
            for rank in ranks:
                rank.sendall(line.encode())
            for rank in ranks:
                assert rank.recv(16) == b"done", "a rank has ended"
            sys.stdout.write("done\n")
            sys.stdout.flush()
        for rank in ranks:
            rank.close()


def _fork(folder: Path, rank: int, world_size: int) -> socket.socket:
    here, there = socket.socketpair()
    if os.fork() == 0:
        here.close()
        try:
            _serve(there, folder, rank, world_size)
        finally:
            os._exit(0)
    there.close()
    return here


def _serve(commands: socket.socket, folder: Path, rank: int, world_size: int) -> None:
    torch.set_num_threads(1)
    case = typical_case(world_size)
    num_groups = 0

    def join() -> None:
        nonlocal num_groups
        num_groups += 1
        store = dist.FileStore(str(folder / f"store{num_groups}"), world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)

    while line := commands.recv(64).decode():
        kind, count = line.split()
        _loop(kind, int(count), lambda: _work(case, rank, world_size), join)
        commands.sendall(b"done")


def _loop(kind: str, count: int, work: Callable[[], object], join: Callable[[], None]) -> None:
    if kind == "standing":
        join()
    for _ in range(count):
        if kind == "group":
            join()
        work()
        if kind == "group":
            dist.destroy_process_group()
    if kind == "standing":
        dist.destroy_process_group()


def _work(case: Case, rank: int, world_size: int) -> tuple[Copies, Copies]:
    trainee = TorchFsdp2().build(case, RankContext(rank=rank, world_size=world_size))
    initial = _copies(trainee.module, parameter_shards)
    trainee.module.train()
    trainee.zero_grad()
    trainee.forward_backward(local_batch(case, 0, rank), token_loss(case))
    return initial, _copies(trainee.module, gradient_shards)


def _copies(module: nn.Module, shards: Callable[[nn.Module], Iterator[LocalShard]]) -> Copies:
    return [
        (shard.name, None if shard.data is None else shard.data.clone()) for shard in shards(module)
    ]


if __name__ == "__main__":
    main(int(sys.argv[1]))

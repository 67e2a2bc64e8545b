"""Lightning Fabric, FSDP2: behind `no_backward_sync(model, enabled=False)` nothing is reduced.

`_FSDPNoSync.__exit__` sets the sync flag to `enabled` where it should set it to what it was:
leaving a context that skips nothing turns synchronisation off. The next backward outside of a
context leaves every gradient None on every rank, and a step moves nothing. Control: the same
batch before.
Exit code 0: fixed, 1: reproduced, 2: could not run. Needs torch and lightning-fabric.
"""

import contextlib
import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS = 2


def shard(module, mesh):
    """What Fabric's documentation has for FSDP2."""
    from torch.distributed.fsdp import fully_shard

    fully_shard(module, mesh=mesh["data_parallel"])
    return module


def run(rank, store, results):
    """One rank: a batch outside of a context, one inside that skips nothing, the first again."""
    os.environ |= {"LOCAL_RANK": str(rank)}
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import ModelParallelStrategy

    strategy = ModelParallelStrategy(shard, data_parallel_size=RANKS, tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=RANKS, strategy=strategy)
    fabric.launch()
    module = fabric.setup_module(torch.nn.Linear(8, 8))

    def gradients(context):
        module.zero_grad()
        with context:
            fabric.backward(module(torch.ones(4, 8)).sum())
        return sum(p.grad is not None for p in module.parameters())

    before = gradients(contextlib.nullcontext())
    inside = gradients(fabric.no_backward_sync(module, enabled=False))
    behind = gradients(contextlib.nullcontext())
    results[rank] = (before, inside, behind)
    dist.destroy_process_group()


def main():
    """Start the ranks, judge what they found, print one line."""
    try:
        with tempfile.TemporaryDirectory() as folder, mp.Manager() as manager:
            results = manager.dict()
            mp.spawn(run, args=(f"{folder}/store", results), nprocs=RANKS)
            before, inside, behind = results[0]
    except Exception as error:
        print(f"COULD NOT RUN: {str(error).strip().splitlines()[-1]}")
        return 2
    if before != 2 or inside != 2:
        print(f"COULD NOT RUN: the control has {before} and {inside} gradients of 2")
        return 2
    if behind == 2:
        print("FIXED: the backward behind the context reduces both gradients")
        return 0
    print(f"REPRODUCED: {behind} of 2 gradients behind the context, 2 of 2 before and inside of it")
    return 1


if __name__ == "__main__":
    sys.exit(main())

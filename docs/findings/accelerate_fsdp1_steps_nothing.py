"""accelerate, FSDP1 as it is by default: `prepare(model, optimizer)`, and no step moves a weight.

`use_orig_params` is False by default. The optimizer then keeps the parameters from before FSDP made
flat ones of them, which never get a gradient. Control: the same with `use_orig_params=True`.
Exit code 0: fixed, 1: reproduced, 2: could not run. Needs torch and accelerate.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS = 2


def moved(*, use_orig_params):
    """By how much a step of SGD moves the weights, all elements summed up."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    AcceleratorState._reset_state(reset_partial_state=True)
    # On the host accelerate would not turn FSDP on: see accelerate_cpu_is_ddp.py.
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1, use_orig_params=use_orig_params)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    module = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module, optimizer = accelerator.prepare(module, optimizer)
    before = [p.detach().clone() for p in module.parameters()]
    accelerator.backward(module(torch.ones(4, 8)).sum())
    optimizer.step()
    return sum(float((p - b).abs().sum()) for p, b in zip(module.parameters(), before))


def run(rank, store, results):
    """One rank: the finding, then the control."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(RANKS), "ACCELERATE_TORCH_DEVICE": "cpu"}
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    results[rank] = (moved(use_orig_params=None), moved(use_orig_params=True))
    dist.destroy_process_group()


def main():
    """Start the ranks, judge what they found, print one line."""
    try:
        with tempfile.TemporaryDirectory() as folder, mp.Manager() as manager:
            results = manager.dict()
            mp.spawn(run, args=(f"{folder}/store", results), nprocs=RANKS)
            found, control = (sum(moves[at] for moves in results.values()) for at in (0, 1))
    except Exception as error:
        print(f"COULD NOT RUN: {str(error).strip().splitlines()[-1]}")
        return 2
    if control == 0:
        print("COULD NOT RUN: the control does not move either")
        return 2
    if found > 0:
        print(f"FIXED: a step moves the weights by {found:.3g}")
        return 0
    print(f"REPRODUCED: a step moves the weights by {found:.3g}, the control by {control:.3g}")
    return 1


if __name__ == "__main__":
    sys.exit(main())

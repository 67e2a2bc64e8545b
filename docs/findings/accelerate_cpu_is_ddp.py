"""accelerate on the host: with an `fsdp_plugin` given, the model is wrapped in DDP, silently.

Control: the same calls with the process's type set to one of an accelerator's give FSDP2.
Exit code 0: fixed, 1: reproduced, 2: could not run. Needs torch and accelerate.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS = 2


def prepared(*, as_accelerator):
    """The type of what `prepare` makes of a module, and what accelerate says it runs as."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    AcceleratorState._reset_state(reset_partial_state=True)
    state = PartialState(cpu=True)
    if as_accelerator:
        state.distributed_type = DistributedType.MULTI_GPU
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    module = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module, _ = accelerator.prepare(module, optimizer)
    elements = sum(getattr(p, "_local_tensor", p).numel() for p in module.parameters())
    return type(module).__name__, str(accelerator.distributed_type), elements


def run(rank, store, results):
    """One rank: the finding, then the control."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(RANKS), "ACCELERATE_TORCH_DEVICE": "cpu"}
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    found = prepared(as_accelerator=False)
    control = prepared(as_accelerator=True)
    if rank == 0:
        results["found"], results["control"] = found, control
    dist.destroy_process_group()


def main():
    """Start the ranks, judge what they found, print one line."""
    try:
        with tempfile.TemporaryDirectory() as folder, mp.Manager() as manager:
            results = manager.dict()
            mp.spawn(run, args=(f"{folder}/store", results), nprocs=RANKS)
            (name, kind, elements), control = results["found"], results["control"]
    except Exception as error:
        print(f"COULD NOT RUN: {str(error).strip().splitlines()[-1]}")
        return 2
    if "FSDP" not in control[0]:
        print(f"COULD NOT RUN: the control made a {control[0]} of {control[2]} elements")
        return 2
    if "FSDP" in name:
        print(f"FIXED: {name}, {elements} elements on a rank")
        return 0
    print(
        f"REPRODUCED: {name} ({kind}), all {elements} elements on every rank, and no warning; "
        f"control {control[0]}, {control[2]} elements"
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())

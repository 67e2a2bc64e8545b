"""accelerate, FSDP1, SHARDED_STATE_DICT: `load_state` before a first step restores no moments.

`load_fsdp_optimizer` lets `dist_cp.load` fill what `FSDP.optim_state_dict` gives of the new AdamW,
which has no state yet: nothing is loaded, and nothing is said.
Control: the same call after a step of the new AdamW, and FSDP2's before one, restore them.
Exit code 0: fixed, 1: reproduced, 2: could not run. Needs torch and accelerate.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS = 2


def prepared(version, *, steps):
    """An accelerator and an optimizer, as each run of a training script makes them anew."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    AcceleratorState._reset_state(reset_partial_state=True)
    # On the host accelerate would not turn FSDP on: see accelerate_cpu_is_ddp.py.
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    options = {"fsdp_version": version, "state_dict_type": "SHARDED_STATE_DICT"}
    options |= {"use_orig_params": True} if version == 1 else {}
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(**options))
    model = torch.nn.Linear(8, 8)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for _ in range(steps):
        accelerator.backward(model(torch.ones(4, 8)).sum())
        optimizer.step()
    return accelerator, optimizer


def moments(optimizer):
    """This rank's first moments, all elements summed up: 0 if there are none."""
    kept = [state["exp_avg"] for state in optimizer.state.values() if "exp_avg" in state]
    return round(sum(float(getattr(t, "_local_tensor", t).abs().sum()) for t in kept), 3)


def run(rank, folder, results):
    """One rank: the moments as saved and as a new run has them, the finding's and the controls'."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(RANKS), "ACCELERATE_TORCH_DEVICE": "cpu"}
    dist.init_process_group("gloo", init_method=f"file://{folder}/s", rank=rank, world_size=RANKS)
    for name, version, steps in (("found", 1, 0), ("stepped", 1, 1), ("fsdp2", 2, 0)):
        accelerator, trained = prepared(version, steps=2)
        accelerator.save_state(f"{folder}/{name}")
        accelerator, resumed = prepared(version, steps=steps)
        accelerator.load_state(f"{folder}/{name}")
        results[name, rank] = moments(trained), moments(resumed)
    dist.destroy_process_group()


def main():
    """Start the ranks, judge what they found, print one line."""
    try:
        with tempfile.TemporaryDirectory() as folder, mp.Manager() as manager:
            results = manager.dict()
            mp.spawn(run, args=(folder, results), nprocs=RANKS)
            told = dict(results)
    except Exception as error:
        print(f"COULD NOT RUN: {str(error).strip().splitlines()[-1]}")
        return 2
    found, *controls = ([told[k, r] for r in range(RANKS)] for k in ("found", "stepped", "fsdp2"))
    if any(was != now or not was for pairs in controls for was, now in pairs):
        print(f"COULD NOT RUN: the controls' moments, saved and resumed, are {controls}")
        return 2
    word = "FIXED" if all(was == now for was, now in found) else "REPRODUCED"
    print(f"{word}: moments on each rank, saved and resumed: {found}; the controls' {controls}")
    return int(word == "REPRODUCED")


if __name__ == "__main__":
    sys.exit(main())

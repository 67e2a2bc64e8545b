"""torch, FSDP1: an optimizer's sharded checkpoint cannot be loaded where a rank has no row of one.

`FSDP.optim_state_dict` under SHARDED_STATE_DICT shards every tensor along dim 0. With 2 rows on 4
ranks two ranks have none, and `torch.distributed.checkpoint.load` raises "Missing key in checkpoint
state_dict: optimizer.param_groups" there. Control: the same with 4 rows.
Exit code 0: fixed, 1: reproduced, 2: could not run. Needs torch alone.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
import torch.multiprocessing as mp
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType

RANKS = 4


def saved_and_loaded(rows, folder):
    """What loading the state that was just saved raises, in one line; empty where nothing."""
    module = FSDP(
        torch.nn.Linear(4, rows, bias=False), device_id=torch.device("cpu"), use_orig_params=True
    )
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    with FSDP.state_dict_type(module, StateDictType.SHARDED_STATE_DICT):
        checkpoint.save(
            {"optimizer": FSDP.optim_state_dict(module, optimizer)},
            storage_writer=checkpoint.FileSystemWriter(folder),
        )
        state = {"optimizer": FSDP.optim_state_dict(module, optimizer)}
        try:
            checkpoint.load(state, storage_reader=checkpoint.FileSystemReader(folder))
        except checkpoint.CheckpointException as error:
            return str(error).strip().splitlines()[-1]
    return ""


def run(rank, folder, results):
    """One rank: the finding, then the control."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
    )
    raised = saved_and_loaded(2, f"{folder}/two")
    results[rank] = (raised, saved_and_loaded(4, f"{folder}/four"))
    dist.destroy_process_group()


def main():
    """Start the ranks, judge what they found, print one line."""
    try:
        with tempfile.TemporaryDirectory() as folder, mp.Manager() as manager:
            results = manager.dict()
            mp.spawn(run, args=(folder, results), nprocs=RANKS)
            raised, control = results[0]
    except Exception as error:
        print(f"COULD NOT RUN: {str(error).strip().splitlines()[-1]}")
        return 2
    if control:
        print(f"COULD NOT RUN: the control raised {control}")
        return 2
    if not raised:
        print("FIXED: the state of 2 rows on 4 ranks is loaded")
        return 0
    print(f"REPRODUCED: 2 rows on 4 ranks: {raised} The control of 4 rows is loaded")
    return 1


if __name__ == "__main__":
    sys.exit(main())

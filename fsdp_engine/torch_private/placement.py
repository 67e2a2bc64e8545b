"""Move a wrapped module between the host and a device, with what FSDP1 keeps of it beside.

Checked on torch 2.13. FSDP2 follows `Module.to` by itself. FSDP1 keeps each unit's shard a second
time, `_local_shard`, which it goes back to whenever it frees what it gathered. Under NO_SHARD it
leaves the original parameters with gradients of before, and keeps the last forward's views, which
hold the memory that they are views of.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel


@torch.no_grad()
def move(root: nn.Module, device: torch.device) -> None:
    """Parameters, their gradients and buffers, each by one blocking copy; FSDP1's by units.

    Nothing of the module may be gathered meanwhile.
    """
    root.to(device)
    for unit in FullyShardedDataParallel.fsdp_modules(root):
        if unit._handle is None:
            continue
        flat: Any = unit._handle.flat_param
        if hasattr(flat, "_local_shard"):  # absent before the first forward
            flat._local_shard = flat.data
        if not unit._handle.uses_sharded_strategy:
            unit._handle._use_unsharded_grad_views()
            flat._tensors[:] = [None] * len(flat._tensors)

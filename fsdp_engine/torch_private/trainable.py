"""What FSDP1 and FSDP2 get wrong about parameters that do not train. Checked on torch 2.13."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from fsdp_engine.torch_private.accumulators import fsdp2_groups, reshard_handle
from fsdp_engine.torch_private.shards import plain_name


def set_trainable(root: nn.Module, names: Collection[str], *, trainable: bool) -> None:
    """Freeze or unfreeze parameters by their names without wrappers; no communication.

    A unit of FSDP2 reads the dtype of its gradients and of their reduction once, at its first
    forward, off the parameters that train then. With none it reduces in the gradients' own dtype
    and does not cast back, which torch refuses when it assigns them: so it is made to read again.
    FSDP1 keeps its dtypes apart from that.
    """
    for name, parameter in root.named_parameters():
        if plain_name(name) in names:
            parameter.requires_grad_(trainable)
    for _, group in fsdp2_groups(root):
        group._init_mp_dtypes()


@torch.no_grad()
def register_frozen(root: FullyShardedDataParallel) -> None:
    """To call behind a backward under NO_SHARD: units that are wholly frozen register parameters.

    They register plain tensors for a forward, and what would undo that hangs on their gradients.
    The next forward takes the tensors for the parameters: it asserts where one is tied, and there
    is no state dict of them.
    """
    for unit in FullyShardedDataParallel.fsdp_modules(root):
        if unit._handle is not None and not unit._handle.flat_param.requires_grad:
            reshard_handle(unit, unit._handle)

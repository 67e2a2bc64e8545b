"""Deferred gradient sync where units or parameters are not used in every micro-batch.

Checked on torch 2.13, whose own code raises in these cases:

- FSDP1: a unit used in an earlier but not in the last micro-batch ("should use
  `_saved_grad_shard`"); with NO_SHARD its gradient is silently not reduced;
- FSDP2 with a reduce dtype of its own: a parameter whose first gradient comes in the last
  micro-batch while others of its unit have accumulated ones ("uniform gradient dtype");
- FSDP1 with NO_SHARD and mixed precision: a tied parameter ("gradient must match");
- FSDP2 with a reduce dtype of its own: a unit that never ran before the end of a micro-batch that
  is not the last (no attribute `_unsharded_param`).

The repairs below add exact zeros or call torch's own reduction; they change no sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import HandleTrainingState, TrainingState
from torch.distributed.fsdp._runtime_utils import (
    _reduce_grad,
    _reduce_grad_no_shard,
    _reshard,
)

from fsdp_engine.torch_private.accumulators import fsdp2_groups


def permit_low_precision(root: FullyShardedDataParallel) -> None:
    """Let tied parameters hold a gradient in the compute dtype between micro-batches.

    With NO_SHARD every forward assigns a tied parameter its own gradient once more, which torch
    refuses where `no_sync` has left one of another dtype.
    """
    for unit in FullyShardedDataParallel.fsdp_modules(root):
        if unit._handle is not None:
            for parameter in unit._handle.flat_param._shared_params or ():
                parameter.grad_dtype = None


def before_deferred_backward(root: nn.Module) -> None:
    """To call between forward and backward of a micro-batch that is not the last.

    Gathers units that never ran, once in their life: on every rank, or on none, because ranks
    must run the same units.
    """
    for module, group in fsdp2_groups(root):
        if any(p.reduce_dtype and not hasattr(p, "_unsharded_param") for p in group.fsdp_params):
            module.unshard()
            module.reshard()


def before_last_backward(root: nn.Module, loss: Tensor) -> None:
    """To call between forward and backward of the last of several deferred micro-batches."""
    if isinstance(root, FullyShardedDataParallel):
        queue: Any = torch.autograd.Variable._execution_engine.queue_callback
        # The loss's own hook is the first of this backward, so FSDP1's final callback, which
        # asserts that all is reduced, is queued behind this one.
        loss.register_hook(lambda _: queue(lambda: _reduce_pending(root)))  # type: ignore[no-untyped-call]  # so in torch
        return
    for _, group in fsdp2_groups(root):
        trainable = [p for p in group.fsdp_params if p.sharded_param.requires_grad]
        if any(p.unsharded_accumulated_grad is not None for p in trainable):
            for parameter in trainable:
                if parameter.unsharded_accumulated_grad is None:
                    parameter.unsharded_accumulated_grad = torch.zeros_like(
                        parameter._unsharded_param, dtype=parameter.reduce_dtype
                    )


@torch.no_grad()
def _reduce_pending(root: FullyShardedDataParallel) -> None:
    """Reduce what earlier micro-batches accumulated in units this backward did not reach."""
    for unit in FullyShardedDataParallel.fsdp_modules(root):
        handle: Any = unit._handle
        if handle is not None and handle.flat_param.requires_grad and _is_pending(handle):
            _reduce(unit, handle)


def _is_pending(handle: Any) -> bool:
    flat = handle.flat_param
    if flat.grad is None or handle._training_state == HandleTrainingState.BACKWARD_POST:
        return False
    if not handle.uses_sharded_strategy:
        return True
    return bool(flat.grad.shape == flat._unpadded_unsharded_size)


def _reduce(unit: FullyShardedDataParallel, handle: Any) -> None:
    """What FSDP1's post-backward hook does when it runs."""
    flat = handle.flat_param
    unit.training_state = TrainingState.FORWARD_BACKWARD
    handle._training_state = HandleTrainingState.BACKWARD_POST
    _reshard(unit, handle, handle.uses_sharded_strategy)
    stream: Any = unit._post_backward_stream
    stream.wait_stream(unit._device_handle.current_stream())
    with unit._device_handle.stream(stream):
        if flat.grad.dtype != handle._reduce_dtype:
            flat.grad.data = flat.grad.to(handle._reduce_dtype)
        reduce = _reduce_grad if handle.uses_sharded_strategy else _reduce_grad_no_shard
        reduce(unit, handle)
    flat._post_backward_called = True

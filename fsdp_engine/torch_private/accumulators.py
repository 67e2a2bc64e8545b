"""What FSDP1 and FSDP2 keep from one micro-batch to the next, and how to be rid of it.

Checked on torch 2.13. After an exception in a micro-batch neither library is fit for the next
forward: parameters are left gathered, training states and hooks are left half way, and gradients
wait in places that `zero_grad` does not reach (FSDP2's `unsharded_accumulated_grad` and
`_unsharded_param.grad`, FSDP1's `_saved_grad_shard`). `FSDPModule.reset_iter_state` undoes the
first two for FSDP2, but leaves the gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import HandleTrainingState, TrainingState
from torch.distributed.fsdp._runtime_utils import _reshard


@torch.no_grad()
def reset(root: nn.Module) -> None:
    """Forget the micro-batches so far: sharded, idle, without any gradient. No communication."""
    if isinstance(root, FullyShardedDataParallel):
        _reset_fsdp1(root)
    else:
        _reset_fsdp2(root)
    clear_gradients(root)


def clear_gradients(root: nn.Module) -> None:
    """Set every gradient to None, FSDP1's flat ones and its notes about them as well.

    FSDP1 notes a parameter whose gradient is None when it gathers for the next forward and drops
    what NO_SHARD then accumulates for it in `no_sync`.
    """
    root.zero_grad()
    for unit in FullyShardedDataParallel.fsdp_modules(root):
        if unit._handle is not None:
            flat: Any = unit._handle.flat_param
            flat.grad = None
            flat._is_grad_none_mask = [False] * flat._num_params


@torch.no_grad()
def reshard(root: nn.Module) -> None:
    """Free what a forward without a backward left gathered; the next forward gathers anew.

    Without this the next forward would run on weights from before the optimizer step.
    """
    if isinstance(root, FSDPModule):
        _reset_iteration(root)  # also what was gathered ahead for a unit that did not run
        return
    for module in FullyShardedDataParallel.fsdp_modules(root):
        if module._handle is not None:
            reshard_handle(module, module._handle)


def fsdp2_groups(root: nn.Module) -> list[tuple[FSDPModule, Any]]:
    """Every FSDP2 module below `root` with each of its parameter groups."""
    return [
        (module, group)
        for module in root.modules()
        if isinstance(module, FSDPModule)
        for group in module._get_fsdp_state()._fsdp_param_groups
    ]


def _reset_fsdp2(root: nn.Module) -> None:
    assert isinstance(root, FSDPModule)
    _reset_iteration(root)
    for _, group in fsdp2_groups(root):
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


def _reset_iteration(root: FSDPModule) -> None:
    """Before the first forward there is nothing to reset, and torch asks for what is not there."""
    if root._get_fsdp_state()._is_root is not None:
        root.reset_iter_state()


def _reset_fsdp1(root: FullyShardedDataParallel) -> None:
    state: Any = root
    state._post_backward_callback_queued = False
    for unit in FullyShardedDataParallel.fsdp_modules(root):
        unit.training_state = TrainingState.IDLE
        if unit._handle is not None:
            _reset_handle(unit, unit._handle)
    order: Any = root._exec_order_data
    if order.is_first_iter:  # half an iteration is no order to prefetch by
        order.handles_pre_forward_order.clear()
        order.handles_post_forward_order.clear()
    else:
        order.next_iter()


def _reset_handle(unit: FullyShardedDataParallel, handle: Any) -> None:
    flat = handle.flat_param
    handle._training_state = HandleTrainingState.IDLE
    reshard_handle(unit, handle)
    if hasattr(flat, "_post_backward_hook_state"):
        flat._post_backward_hook_state[-1].remove()
        del flat._post_backward_hook_state
    if hasattr(flat, "_saved_grad_shard"):
        del flat._saved_grad_shard
    flat._post_backward_called = False
    if flat._tensors is not None:
        flat._tensors[:] = [None] * len(flat._tensors)
    handle._ran_pre_backward_hook = False
    handle._needs_pre_backward_unshard = False
    handle._needs_pre_forward_unshard = False
    handle._post_forward_index = None
    if unit._exec_order_data.is_first_iter:
        handle._pre_forward_order_index = None


def reshard_handle(unit: FullyShardedDataParallel, handle: Any) -> None:
    """Free one FSDP1 unit's gathered parameters and register its own ones again."""
    if hasattr(handle.flat_param, "_local_shard"):  # absent before the first forward
        _reshard(unit, handle, handle.uses_sharded_strategy)

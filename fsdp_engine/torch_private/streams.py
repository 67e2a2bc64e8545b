"""FSDP1's care for memory that another stream uses. Checked on torch 2.13."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, _flat_param, _runtime_utils


def order_zeroed_gradients(root: nn.Module) -> None:
    """To call behind a forward, before a backward adds to gradients that were reduced.

    Before it gathers, FSDP1 zeroes what a flat gradient has of parameters without one of their own,
    frozen ones among them (`_writeback_orig_params`). It does so on a stream for which nobody
    waits, while the backward adds to the same gradient on another. Here the stream that gathers
    does both: for that one the backward waits.
    """
    for unit in FullyShardedDataParallel.fsdp_modules(root):
        frozen = any(not parameter.requires_grad for parameter in unit.parameters())
        if frozen and hasattr(unit, "_unshard_stream"):
            unit._pre_unshard_stream = unit._unshard_stream


def record_streams_of(device_type: str) -> None:
    """Let FSDP1 tell the allocator of this device type which streams use a tensor.

    It does so for a list of device types, before it frees a tensor of one stream that another may
    still use, and leaves the others out.
    """
    listed = _flat_param._no_dispatch_record_stream

    def record(tensor: torch.Tensor, stream: torch.Stream) -> None:
        if tensor.device.type == device_type:
            tensor.record_stream(stream)
        else:
            listed(tensor, stream)

    for module in (_flat_param, _runtime_utils):
        module._no_dispatch_record_stream = record  # type: ignore[attr-defined]

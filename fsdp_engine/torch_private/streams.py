"""FSDP1's care for memory that another stream uses. Checked on torch 2.13."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import _flat_param, _runtime_utils


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

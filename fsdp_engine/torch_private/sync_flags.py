"""FSDP2's flags for the gradient reduction, which torch can set but not read. Checked on 2.13."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule


@contextmanager
def without_reduction(module: nn.Module) -> Iterator[None]:
    """No gradient reduction below `module` inside; every unit's own flags come back."""
    groups = [
        group
        for submodule in module.modules()
        if isinstance(submodule, FSDPModule)
        for group in submodule._get_fsdp_state()._fsdp_param_groups
    ]
    before = [(group.reduce_grads, group.all_reduce_grads) for group in groups]
    try:
        for group in groups:
            group.reduce_grads = group.all_reduce_grads = False
        yield
    finally:
        for group, flags in zip(groups, before, strict=True):
            group.reduce_grads, group.all_reduce_grads = flags

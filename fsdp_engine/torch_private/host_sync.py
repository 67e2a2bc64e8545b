"""FSDP1's broadcast of initial weights on the host.

Checked on torch 2.13. `sync_module_states=True` is refused for parameters on the CPU, for NCCL
cannot send them; gloo can, and the broadcast itself runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from torch.distributed.fsdp import _init_utils


@contextmanager
def host_parameters_synced() -> Iterator[None]:
    """Inside, FSDP1 sends initial weights that are on the host."""
    name = "_check_module_states_for_sync_module_states"
    with mock.patch.object(_init_utils, name):
        yield

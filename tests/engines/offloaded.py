"""Plain FSDP2 with its parameters on the host, in pinned memory: copies do not block."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch.distributed.fsdp import CPUOffloadPolicy

from fsdp_engine.adapters import torch_fsdp
from fsdp_engine.adapters.torch_fsdp import Fsdp2Trainee, TorchFsdp2
from fsdp_engine.contract.case import Case
from fsdp_engine.contract.protocol import RankContext


class Offloaded(TorchFsdp2):
    """`CPUOffloadPolicy` with pinned memory on every unit and on the root."""

    def build(self, case: Case, rank: RankContext) -> Fsdp2Trainee:
        adapter: Any = torch_fsdp
        shard = adapter.fully_shard
        adapter.fully_shard = partial(shard, offload_policy=CPUOffloadPolicy())
        try:
            return super().build(case, rank)
        finally:
            adapter.fully_shard = shard

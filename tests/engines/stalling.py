"""The reference engine with a rank that waits for ever."""

from __future__ import annotations

import threading

import torch.distributed as dist

from fsdp_engine.adapters import reference as adapter
from fsdp_engine.contract.protocol import Losses, TokenLoss
from fsdp_engine.engine.engine import FsdpEngine
from fsdp_engine.workload.batches import LocalBatch
from tests.faults.planting import Planted


class _Waits(FsdpEngine):
    def forward_backward(self, batch: LocalBatch, loss: TokenLoss) -> Losses:
        if dist.get_rank() == 1:
            threading.Event().wait()
        return super().forward_backward(batch, loss)


class Stalls(Planted):
    """Rank 1 waits before its first micro-batch, the others in a collective."""

    exchanged = ((adapter, "FsdpEngine", _Waits),)

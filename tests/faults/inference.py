"""Faults in what inference returns and in what it leaves behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

from fsdp_engine.adapters import reference as adapter
from fsdp_engine.contract.protocol import LocalShard, TokenLoss
from fsdp_engine.engine.engine import FsdpEngine
from fsdp_engine.torch_private.shards import parameter_shards, write_shards
from fsdp_engine.workload.batches import LocalBatch
from tests.faults.planting import Planted


class _StaysInEval(FsdpEngine):
    @contextmanager
    def mode(self, which: Literal["train", "eval"]) -> Iterator[None]:
        with super().mode(which):
            yield
        self.module.train(which == "train")


class EvalModeStays(Planted):
    """The mode that was set before does not come back."""

    exchanged = ((adapter, "FsdpEngine", _StaysInEval),)


class _DoublesBuffers(FsdpEngine):
    @torch.no_grad()
    def infer(self, batch: LocalBatch, loss: TokenLoss) -> Tensor:
        losses = super().infer(batch, loss)
        for buffer in self.module.buffers():
            buffer.add_(buffer)
        return losses


class BuffersDoubled(Planted):
    """Inference counts on in the model's buffers."""

    exchanged = ((adapter, "FsdpEngine", _DoublesBuffers),)


class _InfersOnInitialWeights(FsdpEngine):
    _initial: tuple[LocalShard, ...] = ()

    def zero_grad(self) -> None:
        self._initial = self._initial or _copies(self)
        super().zero_grad()

    def infer(self, batch: LocalBatch, loss: TokenLoss) -> Tensor:
        now = _copies(self)
        write_shards(self.module, self._initial)
        losses = super().infer(batch, loss)
        write_shards(self.module, now)
        return losses


def _copies(engine: FsdpEngine) -> tuple[LocalShard, ...]:
    return tuple(
        LocalShard(
            name=shard.name,
            full_shape=shard.full_shape,
            placement=shard.placement,
            data=None if shard.data is None else shard.data.clone(),
        )
        for shard in parameter_shards(engine.module)
    )


class InferenceOnInitialWeights(Planted):
    """Inference has a copy of the weights that no step refreshes."""

    exchanged = ((adapter, "FsdpEngine", _InfersOnInitialWeights),)


class _InfersUnderAutocast(FsdpEngine):
    def infer(self, batch: LocalBatch, loss: TokenLoss) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().infer(batch, loss)


class InferenceInBf16(Planted):
    """Inference runs under an autocast whose dtype is written down, not configured."""

    exchanged = ((adapter, "FsdpEngine", _InfersUnderAutocast),)


class _MasksLosses(FsdpEngine):
    def infer(self, batch: LocalBatch, loss: TokenLoss) -> Tensor:
        losses = super().infer(batch, loss)
        return losses * batch.select(range(len(batch))).loss_mask.to(losses.dtype)


class InferenceMasked(Planted):
    """Losses of tokens that do not carry loss in training are zero in inference as well."""

    exchanged = ((adapter, "FsdpEngine", _MasksLosses),)


class _ShiftsLosses(FsdpEngine):
    def infer(self, batch: LocalBatch, loss: TokenLoss) -> Tensor:
        return super().infer(batch, loss).roll(1, dims=-1)


class InferenceShifted(Planted):
    """Losses come back one token late."""

    exchanged = ((adapter, "FsdpEngine", _ShiftsLosses),)

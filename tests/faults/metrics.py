"""Faults in what is reported of a batch; its gradients are right."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from fsdp_engine.adapters import reference as adapter
from fsdp_engine.contract.protocol import Losses, TokenLoss
from fsdp_engine.engine.engine import FsdpEngine
from fsdp_engine.engine.normalise import GlobalCounts, count
from fsdp_engine.workload.batches import LocalBatch
from tests.faults.planting import Planted


class _ReportsOwnLoss(FsdpEngine):
    def metrics(self) -> dict[str, float]:
        return super().metrics() | {"loss": self._total}


class OwnLossReported(Planted):
    """Every rank reports its own loss as that of the global batch."""

    exchanged = ((adapter, "FsdpEngine", _ReportsOwnLoss),)


class _SumsLosses(FsdpEngine):
    def metrics(self) -> dict[str, float]:
        reported = super().metrics()
        return reported | {"loss": reported["loss"] * self._mesh.size()}


class LossSummed(Planted):
    """The losses of the ranks are added and not divided."""

    exchanged = ((adapter, "FsdpEngine", _SumsLosses),)


class _ReportsLastMicroBatch(FsdpEngine):
    _last = 0.0

    def _share(
        self, batch: LocalBatch, indices: tuple[int, ...], loss: TokenLoss, counts: GlobalCounts
    ) -> Tensor:
        share = super()._share(batch, indices, loss, counts)
        self._last = share.item()
        return share

    def forward_backward(self, batch: LocalBatch, loss: TokenLoss) -> Losses:
        losses = super().forward_backward(batch, loss)
        self._total = self._last
        return losses


class LastMicroBatchReported(Planted):
    """The reported loss is overwritten by every micro-batch instead of added up."""

    exchanged = ((adapter, "FsdpEngine", _ReportsLastMicroBatch),)


class _AveragesMicroBatches(FsdpEngine):
    def forward_backward(self, batch: LocalBatch, loss: TokenLoss) -> Losses:
        losses = super().forward_backward(batch, loss)
        self._total = losses.total / len(losses.plan)
        return dataclasses.replace(losses, total=self._total)


class LossOverMicroBatches(Planted):
    """The loss is averaged over micro-batches although their shares add up."""

    exchanged = ((adapter, "FsdpEngine", _AveragesMicroBatches),)


class _CountsAllTokens(FsdpEngine):
    def forward_backward(self, batch: LocalBatch, loss: TokenLoss) -> Losses:
        losses = super().forward_backward(batch, loss)
        self._counts = count(batch.lengths, self._device)
        return losses


class AllTokensReported(Planted):
    """The reported number of loss tokens is that of all tokens."""

    exchanged = ((adapter, "FsdpEngine", _CountsAllTokens),)


class _CountsLocally(FsdpEngine):
    def metrics(self) -> dict[str, float]:
        own = self._own
        tokens = {"loss_tokens": float(sum(own)), "sequences": float(sum(n > 0 for n in own))}
        return super().metrics() | tokens

    def forward_backward(self, batch: LocalBatch, loss: TokenLoss) -> Losses:
        self._own = batch.loss_tokens
        return super().forward_backward(batch, loss)


class OwnTokensReported(Planted):
    """Counts are reported as they are on each rank, without a sum."""

    exchanged = ((adapter, "FsdpEngine", _CountsLocally),)

"""Faults in how a micro-batch's loss is normalised, and in which loss tokens are counted."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fsdp_engine.adapters import reference as adapter
from fsdp_engine.contract.case import Case, LossMode
from fsdp_engine.contract.protocol import Losses, TokenLoss
from fsdp_engine.engine import engine as engine_module
from fsdp_engine.engine.engine import FsdpEngine
from fsdp_engine.engine.normalise import GlobalCounts, count, normalise
from fsdp_engine.workload.batches import LocalBatch
from tests.faults.planting import Planted, plant


class SampleShareWeights(Planted):
    """Each micro-batch's mean over its tokens, weighted by its share of the samples."""

    def plant_faults(self, case: Case) -> None:  # noqa: ARG002
        plant(engine_module, "normalise", _by_sample_share)


def _by_sample_share(
    token_losses: Tensor, loss_mask: Tensor, mode: LossMode, counts: GlobalCounts
) -> Tensor:
    if mode != "token-mean":
        return normalise(token_losses, loss_mask, mode, counts)
    share = int((loss_mask.sum(-1) > 0).sum()) / counts.num_sequences
    return _mean(token_losses, loss_mask) * (share * counts.num_ranks)


class NoRankFactor(Planted):
    """Divided by global counts, but not multiplied by the ranks that FSDP averages over."""

    def plant_faults(self, case: Case) -> None:  # noqa: ARG002
        plant(engine_module, "count", _count_one_rank)


class NoRankFactorInOneMode(Planted):
    """The same, forgotten in one loss mode only."""

    def plant_faults(self, case: Case) -> None:
        mistaken = case.engine.loss_mode == "seq-mean-token-sum"
        plant(engine_module, "count", _count_one_rank if mistaken else count)


def _count_one_rank(loss_tokens: tuple[int, ...], device: torch.device) -> GlobalCounts:
    counts = count(loss_tokens, device)
    return GlobalCounts(
        num_ranks=1, num_tokens=counts.num_tokens, num_sequences=counts.num_sequences
    )


class LocalTokenCount(Planted):
    """Every rank divides by its own number of tokens."""

    def plant_faults(self, case: Case) -> None:  # noqa: ARG002
        plant(engine_module, "count", _count_locally)


def _count_locally(loss_tokens: tuple[int, ...], _device: torch.device) -> GlobalCounts:
    return GlobalCounts(
        num_ranks=1,
        num_tokens=sum(loss_tokens),
        num_sequences=sum(n > 0 for n in loss_tokens),
    )


class PaddingCounted(Planted):
    """The denominator counts all tokens of a sequence, not those that carry loss."""

    def plant_faults(self, case: Case) -> None:  # noqa: ARG002
        plant(adapter, "FsdpEngine", _CountsAllTokens)


class _CountsAllTokens(FsdpEngine):
    def forward_backward(self, batch: LocalBatch, loss: TokenLoss) -> Losses:
        def all_tokens(_: tuple[int, ...], device: torch.device) -> GlobalCounts:
            return count(batch.lengths, device)

        plant(engine_module, "count", all_tokens)
        return super().forward_backward(batch, loss)


class MeanOfMeans(Planted):
    """Each micro-batch's own mean over its tokens, as if all micro-batches had the same number."""

    def plant_faults(self, case: Case) -> None:  # noqa: ARG002
        plant(adapter, "FsdpEngine", _AveragesMicroBatches)


class _AveragesMicroBatches(FsdpEngine):
    def forward_backward(self, batch: LocalBatch, loss: TokenLoss) -> Losses:
        def mean_of_means(
            token_losses: Tensor, loss_mask: Tensor, mode: LossMode, counts: GlobalCounts
        ) -> Tensor:
            if mode != "token-mean":
                return normalise(token_losses, loss_mask, mode, counts)
            share = len(token_losses) / len(batch)
            return _mean(token_losses, loss_mask) * share

        plant(engine_module, "normalise", mean_of_means)
        return super().forward_backward(batch, loss)


def _mean(token_losses: Tensor, loss_mask: Tensor) -> Tensor:
    mask = loss_mask.to(token_losses.dtype)
    return (token_losses * mask).sum() / mask.sum().clamp(min=1)


class _ScalesByShards(FsdpEngine):
    def forward_backward(self, batch: LocalBatch, loss: TokenLoss) -> Losses:
        num_shards = self._mesh.shape[-1]

        def count_shards(loss_tokens: tuple[int, ...], device: torch.device) -> GlobalCounts:
            return replace(count(loss_tokens, device), num_ranks=num_shards)

        plant(engine_module, "count", count_shards)
        return super().forward_backward(batch, loss)


class RescaledByShards(Planted):
    """Multiplied by the ranks of a shard group where the average is over all ranks."""

    exchanged = ((adapter, "FsdpEngine", _ScalesByShards),)


class _RunsUnderAutocast(FsdpEngine):
    def _share(
        self, batch: LocalBatch, indices: tuple[int, ...], loss: TokenLoss, counts: GlobalCounts
    ) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super()._share(batch, indices, loss, counts)


class AutocastHardCoded(Planted):
    """Forward runs under a bf16 autocast, whatever the policy says."""

    exchanged = ((adapter, "FsdpEngine", _RunsUnderAutocast),)

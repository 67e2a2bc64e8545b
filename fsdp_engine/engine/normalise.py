"""From per-token losses to a micro-batch's share of the global loss.

FSDP averages gradients over all ranks of the mesh and knows nothing of micro-batches, so every
share is divided by global counts and multiplied by the number of ranks; the shares of all
micro-batches then add up to the gradient of the global loss however the batch is split.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_engine.contract.case import LossMode


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalCounts:
    """Ranks that FSDP averages over; loss tokens and sequences that have any, of all ranks."""

    num_ranks: int
    num_tokens: int
    num_sequences: int


def count(loss_tokens: tuple[int, ...], device: torch.device) -> GlobalCounts:
    """Counts over all ranks from the rank's loss tokens per sequence. One all-reduce."""
    counts = torch.tensor([sum(loss_tokens), sum(n > 0 for n in loss_tokens)], device=device)
    dist.all_reduce(counts)
    num_tokens, num_sequences = map(int, counts.tolist())
    return GlobalCounts(
        num_ranks=dist.get_world_size(), num_tokens=num_tokens, num_sequences=num_sequences
    )


def normalise(
    token_losses: Tensor, loss_mask: Tensor, mode: LossMode, counts: GlobalCounts
) -> Tensor:
    """The scalar to call backward on, from `[sequences, tokens]` losses and their mask.

    A batch without any loss token has nothing to be averaged: its loss is zero.
    """
    mask = loss_mask.to(token_losses.device, token_losses.dtype)
    masked = token_losses * mask
    per_token = counts.num_ranks / max(counts.num_tokens, 1)
    per_sequence = counts.num_ranks / max(counts.num_sequences, 1)
    match mode:
        case "token-mean":
            return masked.sum() * per_token
        case "token-sum":
            return masked.sum() * float(counts.num_ranks)
        case "seq-mean-token-sum":
            return masked.sum() * per_sequence
        case "seq-mean-token-mean":
            return (masked.sum(-1) / mask.sum(-1).clamp(min=1)).sum() * per_sequence

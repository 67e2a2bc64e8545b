"""Per-token losses, the same for engine and oracle. How they are normalised is each side's own."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from fsdp_engine.contract.case import Case
from fsdp_engine.contract.protocol import TokenLoss
from fsdp_engine.workload.batches import MicroBatch


def token_loss(case: Case) -> TokenLoss:
    """The case's loss: `(module output, micro-batch) -> [sequences, tokens]`.

    fp64 outputs give fp64 losses, all others fp32.
    """
    return squared if case.loss == "squared" else cross_entropy


def squared(output: object, micro_batch: MicroBatch) -> Tensor:
    """Half the squared distance to the target, summed over the last dimension."""
    outputs = _outputs(output)
    difference = outputs - micro_batch.targets.to(outputs.dtype)
    return (difference * difference).sum(-1) * 0.5


def cross_entropy(output: object, micro_batch: MicroBatch) -> Tensor:
    """Negative log-likelihood of the target token."""
    outputs = _outputs(output)
    flat = functional.cross_entropy(
        outputs.flatten(0, 1), micro_batch.targets.flatten(), reduction="none"
    )
    return flat.view(outputs.shape[:2])


def _outputs(output: object) -> Tensor:
    tensor = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(tensor, Tensor):
        raise TypeError(f"a module must return a tensor or an output with logits, not {output!r}")
    return tensor if tensor.dtype == torch.float64 else tensor.float()

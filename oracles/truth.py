"""What training means: the gradient of the whole global batch in double.

No ranks, no micro-batches, no engine: one evaluation over all sequences, the loss normalised in
this module's own words from the counts in the case.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fsdp_engine.contract.batch import Batch
from fsdp_engine.contract.case import Case, LossMode
from fsdp_engine.workload.batches import MicroBatch, global_batch
from oracles.arrays import Float64, float64_of
from oracles.evaluation import FLOAT64, Evaluator, Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """The global loss and its gradient per parameter, full shape; zeros where there is none."""

    loss: float
    gradients: dict[str, Float64]


def truth(evaluator: Evaluator, batch_index: int, weights: Weights) -> Truth:
    """Loss and gradients over batch `batch_index`.

    `weights` are those in the storage dtype; they are taken as they are, in double.
    """
    case = evaluator.case
    everything = global_batch(case, batch_index)
    micro_batch = everything.select(range(len(everything)))

    def total(losses: Tensor, at: MicroBatch) -> Tensor:
        return _weighted_sum(losses, at, case.engine.loss_mode)

    with evaluator.loaded(weights, FLOAT64):
        evaluation = evaluator.evaluate(micro_batch, total)
    # Division last: sums of dyadic numbers stay exact, and only the quotient is rounded.
    divisor = _divisor(case, case.batches[batch_index])
    gradients = {name: np.zeros(shape) for name, shape in evaluator.shapes.items()}
    for name, gradient in evaluation.gradients.items():
        assert gradient.dtype == torch.float64, name
        gradients[name] = float64_of(gradient) / divisor
    return Truth(loss=evaluation.total / divisor, gradients=gradients)


def _weighted_sum(losses: Tensor, micro_batch: MicroBatch, mode: LossMode) -> Tensor:
    """Sum of the loss tokens' losses; of the sequences' means in seq-mean-token-mean."""
    carried = torch.where(micro_batch.loss_mask, losses, 0.0)
    if mode != "seq-mean-token-mean":
        return carried.sum()
    counts = micro_batch.loss_mask.sum(1)
    used = counts > 0
    return (carried.sum(1)[used] / counts[used]).sum()


def _divisor(case: Case, batch: Batch) -> int:
    """Over how many tokens or sequences the mode averages."""
    match case.engine.loss_mode:
        case "token-sum":
            return 1
        case "token-mean":
            return sum(sequence.loss_tokens for sequence in batch.sequences)
        case "seq-mean-token-sum" | "seq-mean-token-mean":
            return sum(sequence.loss_tokens > 0 for sequence in batch.sequences)

"""The local gradients of every rank, bit for bit, from one process.

Sharding does not change a rank's own arithmetic: it gathers parameters, computes the same forward
and backward, and reduces. So the engine's micro-batches are run here one after the other under the
declared dtypes, and what a rank would hand to its reduction is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from torch import Tensor

from fsdp_engine.contract.batch import Batch
from fsdp_engine.contract.case import Case
from fsdp_engine.contract.observation import Numerics
from fsdp_engine.workload.batches import MicroBatch, local_batch
from fsdp_engine.workload.models import TORCH_DTYPES
from oracles.calibration import loss_spread, mean_spread
from oracles.evaluation import FLOAT32, FLOAT64, Arithmetic, Evaluator, Total, Weights

Plan: TypeAlias = Sequence[Sequence[int]]
"""One rank's sequence indices per micro-batch."""

Gradients: TypeAlias = dict[str, Tensor]
"""By parameter name, full shape; a missing name has no gradient, which counts as zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalGradients:
    """What the ranks hand to their reductions.

    `reduced[rank][t]`: t counts micro-batches in eager mode; deferred there is one entry.
    `losses[rank][micro_batch]`: normalised losses. `used[micro_batch]`: the parameters that had a
    gradient on any rank. `spread` and `loss_spread` say how far two replays were apart, by
    parameter and by rank, where they were (`oracles.calibration`).
    """

    reduced: tuple[tuple[Gradients, ...], ...]
    losses: tuple[tuple[float, ...], ...]
    used: tuple[frozenset[str], ...]
    spread: Mapping[str, float] = field(default_factory=dict)
    loss_spread: Mapping[int, float] = field(default_factory=dict)


def replay(
    evaluator: Evaluator,
    batch_index: int,
    plans: Sequence[Plan],
    numerics: Numerics,
    weights: Weights,
) -> LocalGradients:
    """Replay the plans under the declared numerics.

    `plans[rank]` must partition the rank's sequences, with the same count on all ranks. `weights`
    are in storage dtype. On a device with an arithmetic of its own it is done twice.
    """
    arithmetic = Arithmetic.of(numerics)
    local = _replay(evaluator, batch_index, plans, numerics, weights, arithmetic)
    if arithmetic.device is None:
        return local
    arithmetic = replace(arithmetic, elsewhere=True)
    again = _replay(evaluator, batch_index, plans, numerics, weights, arithmetic)
    return replace(
        local,
        spread=mean_spread(local.reduced, again.reduced),
        loss_spread=loss_spread(local.losses, again.losses),
    )


def replay_float64(
    evaluator: Evaluator,
    batch_index: int,
    plans: Sequence[Plan],
    numerics: Numerics,
    weights: Weights,
) -> LocalGradients:
    """The same code in double throughout; it must agree with the truth."""
    wide = replace(numerics, local_accumulate="float64")
    return _replay(evaluator, batch_index, plans, wide, weights, FLOAT64)


def replay_float32(
    evaluator: Evaluator,
    batch_index: int,
    plans: Sequence[Plan],
    numerics: Numerics,
    weights: Weights,
) -> LocalGradients:
    """The same code in single, to see what single costs on this case."""
    single = replace(numerics, local_accumulate="float32")
    return _replay(evaluator, batch_index, plans, single, weights, FLOAT32)


def _replay(  # noqa: PLR0917  one seam for three arithmetics
    evaluator: Evaluator,
    batch_index: int,
    plans: Sequence[Plan],
    numerics: Numerics,
    weights: Weights,
    arithmetic: Arithmetic,
) -> LocalGradients:
    case = evaluator.case
    total = _normalised(case, case.batches[batch_index])
    batches = [local_batch(case, batch_index, rank) for rank in range(len(plans))]
    # Data before `loaded`: the mode for double would keep the data from being rounded to float32.
    micro_batches = [
        [batch.select(indices) for indices in plan]
        for batch, plan in zip(batches, plans, strict=True)
    ]
    with evaluator.loaded(weights, arithmetic):
        runs = [
            [evaluator.evaluate(micro_batch, total) for micro_batch in rank]
            for rank in micro_batches
        ]
    used = tuple(
        frozenset(name for run in runs for name in run[k].gradients) for k in range(len(runs[0]))
    )
    reduced = []
    for run in runs:
        per_micro_batch = [evaluation.gradients for evaluation in run]
        if numerics.deferred:
            per_micro_batch = [_accumulated(per_micro_batch, numerics)]
        reduced.append(tuple(per_micro_batch))
    losses = tuple(tuple(evaluation.total for evaluation in run) for run in runs)
    return LocalGradients(reduced=tuple(reduced), losses=losses, used=used)


def _accumulated(per_micro_batch: list[Gradients], numerics: Numerics) -> Gradients:
    """Add up in the local-accumulate dtype, one rounding per addition.

    The first gradient is cast to that dtype. The in-place addition of a finer dtype rounds once,
    the sum; casting the addend first would round twice.
    """
    dtype = TORCH_DTYPES[numerics.local_accumulate]
    accumulated: Gradients = {}
    for gradients in per_micro_batch:
        for name, gradient in gradients.items():
            if name in accumulated:
                accumulated[name] += gradient
            else:
                accumulated[name] = gradient.to(dtype, copy=True)
    return accumulated


def _normalised(case: Case, batch: Batch) -> Total:
    """The canonical association of the protocol: `(losses, micro-batch) -> scalar`."""
    world_size = case.mesh.world_size
    num_tokens = batch.loss_tokens
    num_sequences = sum(sequence.loss_tokens > 0 for sequence in batch.sequences)

    def total(losses: Tensor, micro_batch: MicroBatch) -> Tensor:
        mask = micro_batch.loss_mask.to(losses.dtype)
        masked = losses * mask
        match case.engine.loss_mode:
            case "token-mean":
                return masked.sum() * (world_size / num_tokens)
            case "token-sum":
                return masked.sum() * world_size
            case "seq-mean-token-sum":
                return masked.sum() * (world_size / num_sequences)
            case "seq-mean-token-mean":
                means = masked.sum(1) / mask.sum(1).clamp(min=1)
                return means.sum() * (world_size / num_sequences)

    return total

"""What an engine may report of a batch: the loss of the global batch and the counts it is over.

The loss is the mode's functional of the per-token losses of all ranks, in this module's own words.
Those losses are replayed bit for bit; what adding them up may round is bounded for any order and
any association of sums and normalisers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from fsdp_engine.contract.batch import Batch
from fsdp_engine.contract.case import LossMode
from fsdp_engine.contract.observation import Numerics
from fsdp_engine.workload.batches import MicroBatch, global_batch, local_batch
from oracles.arrays import Float64, float64_of
from oracles.calibration import values_apart, widened
from oracles.compare import Reference, compare_with_truth
from oracles.evaluation import FLOAT32, FLOAT64, Arithmetic, Evaluator, Weights
from oracles.findings import Findings
from oracles.records import TrainAction
from oracles.replay import Plan
from oracles.rounding import EVALUATION, FORMATS, gamma
from oracles.verdict import Mismatch

COUNTS = ("loss_tokens", "sequences")
KNOWN = ("loss", *COUNTS)
"""The names that have a meaning for every engine."""


def counts_of(batch: Batch) -> dict[str, float]:
    """Loss tokens of all ranks, and sequences that have any."""
    bearing = sum(sequence.loss_tokens > 0 for sequence in batch.sequences)
    return {"loss_tokens": float(batch.loss_tokens), "sequences": float(bearing)}


def loss_of(sequences: Sequence[Float64], mode: LossMode) -> float:
    """The global loss of all sequences, each given as the losses of its loss tokens.

    Sums are exact and rounded once, divisions are rounded. A sequence without loss tokens is not
    counted and adds nothing.
    """
    bearing = [losses for losses in sequences if losses.size]
    if mode == "seq-mean-token-mean":
        return math.fsum(math.fsum(losses) / losses.size for losses in bearing) / len(bearing)
    total = math.fsum(loss for losses in bearing for loss in losses.tolist())
    match mode:
        case "token-sum":
            return total
        case "token-mean":
            return total / sum(losses.size for losses in bearing)
        case "seq-mean-token-sum":
            return total / len(bearing)


def num_roundings(batch: Batch, num_micro_batches: int) -> int:
    """Most roundings that one token's loss meets on its way into the reported loss.

    Additions: to the other tokens of its micro-batch, padding included, of the rank's
    micro-batches and of the ranks. Four scalings and casts: the mean of a sequence, the quotient
    of the normaliser, the product with it, the mean over ranks; one more for the report's dtype.
    """
    longest = max(sequence.length for sequence in batch.sequences)
    positions = longest * max(map(len, batch.ranks))
    return positions + num_micro_batches + len(batch.ranks) + 5


def metric_mismatches(action: TrainAction, batch: Batch) -> list[Mismatch]:
    """Counts that are not the batch's, and whatever ranks do not report alike, in any bit."""
    found: list[Mismatch] = []
    first = action.records[0].metrics
    for rank, record in enumerate(action.records):
        where = f"{action} metric"
        for name in sorted({*first, *record.metrics}):
            told = [repr(metrics.get(name)) for metrics in (record.metrics, first)]
            if told[0] != told[1]:
                place = f"{where} {name}, rank {rank}"
                wanted = f"{told[1]} as on rank 0"
                found.append(Mismatch(where=place, got=told[0], wanted=wanted))
        for name, count in counts_of(batch).items():
            got = record.metrics.get(name, count)
            if got != count:
                place = f"{where} {name}, rank {rank}"
                found.append(Mismatch(where=place, got=repr(got), wanted=repr(count)))
    return found


def judge_loss(
    evaluator: Evaluator, numerics: Numerics, action: TrainAction, weights: Weights
) -> Findings:
    """The reported loss against the replayed losses, and their meaning against the truth."""
    case = evaluator.case
    batch, mode = case.batches[action.batch], case.engine.loss_mode
    plans = [record.plan for record in action.records]
    own = Arithmetic.of(numerics)
    wanted = loss_of(_planned(evaluator, action.batch, plans, weights, own), mode)
    spread = 0.0
    if own.device is not None:
        own = replace(own, elsewhere=True)
        again = loss_of(_planned(evaluator, action.batch, plans, weights, own), mode)
        spread = values_apart(np.array(wanted), np.array(again))
    findings = Findings(widened=spread > 0.0)
    _judge_reported(findings, action, (wanted, spread), numerics, batch)
    wide, narrow = (
        np.array([loss_of(_planned(evaluator, action.batch, plans, weights, arithmetic), mode)])
        for arithmetic in (FLOAT64, FLOAT32)
    )
    findings.add(
        compare_with_truth(
            Reference(wide=wide, narrow=narrow, scale=float(np.abs(wide).max())),
            np.array([loss_of(_global(evaluator, action.batch, weights), mode)]),
            num_addends=2 * sum(sequence.length for sequence in batch.sequences),
            elements=np.zeros(1, dtype=np.bool_),
            where=f"{action} meaning of the partition, loss",
        )
    )
    return findings


def _judge_reported(
    findings: Findings,
    action: TrainAction,
    replayed: tuple[float, float],
    numerics: Numerics,
    batch: Batch,
) -> None:
    """Per-token losses are not negative: the sum of magnitudes is the loss itself.

    `replayed` is the loss and how far two replays of it are apart.
    """
    wanted, spread = replayed
    u = FORMATS["float64" if numerics.compute == "float64" else "float32"].u
    count = num_roundings(batch, len(action.records[0].plan))
    allowed = gamma(count, u) * (abs(wanted) + spread) * (1.0 + EVALUATION) + spread
    for rank, record in enumerate(action.records):
        got = record.metrics.get("loss")
        if got is None or got == wanted:
            continue
        off = abs(got - wanted)
        findings.margin = max(findings.margin, off / allowed if allowed else math.inf)
        if not off <= allowed:
            findings.mismatches.append(
                Mismatch(
                    where=f"{action} metric loss, rank {rank}",
                    got=repr(got),
                    wanted=repr(wanted) + widened(spread),
                    off=off,
                    allowed=allowed,
                )
            )


def _planned(
    evaluator: Evaluator,
    batch: int,
    plans: Sequence[Plan],
    weights: Weights,
    arithmetic: Arithmetic,
) -> list[Float64]:
    """The loss tokens' losses of every sequence, evaluated micro-batch by micro-batch."""
    wholes = [local_batch(evaluator.case, batch, rank) for rank in range(len(plans))]
    micro_batches = [
        whole.select(indices) for whole, plan in zip(wholes, plans, strict=True) for indices in plan
    ]
    return _losses(evaluator, micro_batches, weights, arithmetic)


def _global(evaluator: Evaluator, batch: int, weights: Weights) -> list[Float64]:
    everything = global_batch(evaluator.case, batch)
    return _losses(evaluator, [everything.select(range(len(everything)))], weights, FLOAT64)


def _losses(
    evaluator: Evaluator,
    micro_batches: Sequence[MicroBatch],
    weights: Weights,
    arithmetic: Arithmetic,
) -> list[Float64]:
    rows: list[Float64] = []
    with evaluator.loaded(weights, arithmetic):
        for micro_batch in micro_batches:
            losses = float64_of(evaluator.losses(micro_batch, training=True))
            masks = micro_batch.loss_mask.numpy()
            rows += [row[mask] for row, mask in zip(losses, masks, strict=True)]
    return rows


def reports_anything(metrics: Mapping[str, float]) -> bool:
    """Whether a name with a meaning is among them."""
    return any(name in metrics for name in KNOWN)

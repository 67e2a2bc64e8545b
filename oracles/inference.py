"""What inference must return: per-token losses at the engine's own weights of that moment.

A rank's batch is one forward in eval mode under the declared numerics, so the replay of it in one
process gives the same bits; where a device does not repeat itself, within its spread
(`oracles.calibration`). Behind a sequence's end a row is padding, of which nothing is said.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from torch import Tensor

from fsdp_engine.contract.case import Case
from fsdp_engine.contract.observation import Array, InferRecord, Numerics
from fsdp_engine.workload.batches import global_batch, local_batch
from oracles.arrays import Float64, array_of, float64_of, tensor_of
from oracles.bitwise import array_mismatches
from oracles.calibration import values_apart
from oracles.compare import Reference, compare_with_truth, compare_within
from oracles.evaluation import FLOAT32, FLOAT64, Arithmetic, Evaluator, Weights
from oracles.findings import Findings
from oracles.moments import Moment
from oracles.verdict import Mismatch, Verdict, combine, exactly, failing


def replayed_losses(
    evaluator: Evaluator, batch: int, weights: Weights, arithmetic: Arithmetic
) -> tuple[Tensor, ...]:
    """`[sequences, longest]` of every rank, each rank's batch in one forward."""
    case = evaluator.case
    wholes = [local_batch(case, batch, rank) for rank in range(case.mesh.world_size)]
    micro_batches = [whole.select(range(len(whole))) for whole in wholes]
    with evaluator.loaded(weights, arithmetic):
        return tuple(evaluator.losses(one, training=False) for one in micro_batches)


def true_losses(evaluator: Evaluator, batch: int, weights: Weights) -> tuple[Float64, ...]:
    """Every sequence's losses in double, in rank order, from one forward over all of them."""
    everything = global_batch(evaluator.case, batch)
    whole = everything.select(range(len(everything)))
    with evaluator.loaded(weights, FLOAT64):
        losses = float64_of(evaluator.losses(whole, training=False))
    return tuple(row[:length] for row, length in zip(losses, everything.lengths, strict=True))


def judge_inference(
    evaluator: Evaluator, numerics: Numerics, moment: Moment, batch: int
) -> Verdict:
    """One infer action on every rank: bit for bit the replay, and its meaning the truth."""
    weights, case = moment.before.weights, evaluator.case
    own = Arithmetic.of(numerics)
    wanted = replayed_losses(evaluator, batch, weights, own)
    again = wanted
    if own.device is not None:
        again = replayed_losses(evaluator, batch, weights, replace(own, elsewhere=True))
    verdicts = []
    for rank, (record, losses) in enumerate(zip(moment.records, wanted, strict=True)):
        assert isinstance(record, InferRecord)
        lengths = tuple(sequence.length for sequence in case.batches[batch].ranks[rank])
        where = f"{moment} rank {rank} token losses"
        spread = values_apart(float64_of(losses), float64_of(again[rank]))
        verdicts.append(_judge_rows(where, record.token_losses, losses, lengths, spread))
    return combine(*verdicts, _judge_meaning(evaluator, moment, batch, weights))


def _judge_rows(
    where: str, got: Array, wanted: Tensor, lengths: tuple[int, ...], spread: float
) -> Verdict:
    replayed = array_of(wanted)
    for field in ("dtype", "shape"):
        told = [str(getattr(array, field)) for array in (got, replayed)]
        if told[0] != told[1]:
            return failing(Mismatch(where=f"{where} {field}", got=told[0], wanted=told[1]))
    mismatches, findings = [], Findings()
    for index, (one, other, length) in enumerate(zip(tensor_of(got), wanted, lengths, strict=True)):
        place, own, replay = f"{where} of sequence {index}", one[:length], other[:length]
        if spread:
            allowed = np.full(length, spread)
            within = compare_within(float64_of(own), float64_of(replay), allowed, where=place)
            findings.add(within, spread=spread)
        else:
            mismatches += array_mismatches(f"{place}, token ", array_of(own), array_of(replay))
    return findings.verdict("calibrated") if spread else exactly(mismatches)


def _judge_meaning(evaluator: Evaluator, moment: Moment, batch: int, weights: Weights) -> Verdict:
    """A sequence's losses are its own, whatever it is batched with. Calibrated."""
    case = evaluator.case
    lengths = [sequence.length for sequence in case.batches[batch].sequences]
    wide = _flat(replayed_losses(evaluator, batch, weights, FLOAT64), case, batch)
    narrow = _flat(replayed_losses(evaluator, batch, weights, FLOAT32), case, batch)
    findings = Findings()
    findings.add(
        compare_with_truth(
            Reference(wide=wide, narrow=narrow, scale=float(np.abs(wide).max())),
            np.concatenate(true_losses(evaluator, batch, weights)),
            num_addends=2 * sum(lengths),
            elements=np.zeros(wide.shape, dtype=np.bool_),
            where=f"{moment} meaning of the ranks' batches, token losses",
        )
    )
    return findings.verdict("calibrated")


def _flat(by_rank: tuple[Tensor, ...], case: Case, batch: int) -> Float64:
    """All losses of all sequences one after the other, without padding."""
    rows = [
        float64_of(row[: sequence.length])
        for losses, held in zip(by_rank, case.batches[batch].ranks, strict=True)
        for row, sequence in zip(losses, held, strict=True)
    ]
    return np.concatenate(rows)

"""A run's gradients against replay and truth, one training action after the other.

The weights of an action are those of the case; after a step they are the engine's own: how a step
gets from gradients to parameters is another oracle's matter, and its errors are not carried on.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from fsdp_engine.contract.observation import Observation
from oracles.arrays import Float64, dtype_name, float64_of, same_bits
from oracles.assembly import Assembled, assemble, replica_mismatches
from oracles.compare import (
    Comparison,
    Reference,
    compare_exact,
    compare_with_candidates,
    compare_with_replay,
    compare_with_truth,
)
from oracles.evaluation import Evaluator
from oracles.findings import Findings
from oracles.moments import moments
from oracles.plans import numerics_mismatches, plan_mismatches
from oracles.prediction import Prediction, effective_numerics, predict
from oracles.records import TrainAction, train_actions
from oracles.reduction import magnitude, mean
from oracles.rounding import gamma
from oracles.truth import Truth
from oracles.verdict import Mismatch, Verdict, combine, exactly


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionGradients:
    """One training action: what was shown, assembled, and what was predicted.

    `prediction` is None where the plan or the parts do not allow one; `mismatches` say why.
    """

    action: TrainAction
    assembled: Assembled
    prediction: Prediction | None
    mismatches: tuple[Mismatch, ...]

    def got(self, name: str) -> Float64:
        """The first replica's gradient in double; an absent one is zero."""
        tensor = self.assembled.full.get(name)
        assert self.prediction is not None
        return np.zeros(self.prediction.shapes[name]) if tensor is None else float64_of(tensor)


def observed_gradients(
    evaluator: Evaluator,
    observation: Observation,
    *,
    truths: Mapping[int, Truth] | None = None,
    only: Container[int] | None = None,
) -> Iterator[ActionGradients]:
    """Assemble and predict every training action in turn, or those at the places in `only`.

    `truths` by batch index replace this case's own: for the same sequences in another partition.
    """
    case = evaluator.case
    actions = {
        action.index: action
        for action in train_actions(case, observation)
        if only is None or action.index in only
    }
    for moment in moments(evaluator, observation):
        if moment.index not in actions:
            if moment.after is None:
                return  # another check accuses; from here on there are no weights to go from
            continue
        action = actions[moment.index]
        evaluator.freeze(moment.before.frozen)
        numerics = effective_numerics(observation.numerics, action)
        assembled = assemble(
            [record.gradients for record in action.records],
            mesh=case.mesh,
            shapes=evaluator.shapes,
            where=f"{action} gradient",
        )
        mismatches = [
            *plan_mismatches(case, action),
            *numerics_mismatches(case, observation.numerics),
        ]
        prediction = None
        if not mismatches:
            known = (truths or {}).get(action.batch)
            prediction = predict(evaluator, action, numerics, moment.before.weights, known)
        yield ActionGradients(
            action=action,
            assembled=assembled,
            prediction=prediction,
            mismatches=(*mismatches, *assembled.mismatches, *moment.mismatches),
        )


def judge(shown: ActionGradients) -> Verdict:
    """One action by everything the oracles say: form, replay, truth, and truth bit for bit."""
    verdicts = [exactly(list(shown.mismatches))]
    if shown.prediction is not None:
        verdicts.append(judge_replay(shown, shown.prediction))
        verdicts.append(judge_truth(shown, shown.prediction))
        verdicts.append(judge_exact(shown, shown.prediction))
    return combine(*verdicts)


def start_mismatches(evaluator: Evaluator, observation: Observation) -> list[Mismatch]:
    """Where the engine's initial parameters are not the case's, bit for bit."""
    where = "initial parameter"
    assembled = assemble(
        [rank.initial for rank in observation.ranks],
        mesh=evaluator.case.mesh,
        shapes=evaluator.shapes,
        where=where,
    )
    found = [*assembled.mismatches, *replica_mismatches(assembled, where=where)]
    for name, tensor in assembled.full.items():
        wanted = evaluator.weights[name]
        if tensor is None:
            found.append(Mismatch(where=f"{where} {name}", got="absent", wanted="present"))
        elif not same_bits(tensor, wanted):
            found.append(
                Mismatch(
                    where=f"{where} {name}",
                    got=f"{tensor.dtype} {tensor.flatten()[:4].tolist()} ...",
                    wanted=f"{wanted.dtype} {wanted.flatten()[:4].tolist()} ...",
                )
            )
    return found


def judge_replay(shown: ActionGradients, prediction: Prediction) -> Verdict:
    """Engine against replay: the bound, the emulated sums, the losses. Rigorous."""
    findings = Findings()
    action = shown.action
    for name, tensor in shown.assembled.full.items():
        where = f"{action} gradient {name}"
        spread = prediction.spread(name)
        findings.mismatches += _form_mismatches(where, name, tensor, prediction)
        comparison = compare_with_replay(
            shown.got(name),
            prediction.terms(name),
            allowance=prediction.allowance,
            world_size=prediction.world_size,
            where=where,
            spread=spread,
        )
        findings.add(comparison, spread=spread)
        candidates = None if comparison.mismatch else prediction.candidates(name)
        if candidates is not None:
            findings.add(compare_with_candidates(shown.got(name), candidates, where=where))
    for rank, record in enumerate(action.records):
        where = f"{action} total loss, rank {rank}"
        findings.add(
            _compare_loss(where, record.total_loss, prediction, rank),
            spread=prediction.loss_spread(rank),
        )
    return findings.verdict("rigorous")


def judge_truth(shown: ActionGradients, prediction: Prediction) -> Verdict:
    """Replay in double against the truth, loss and gradients. Calibrated unless certified."""
    findings = Findings()
    world_size = prediction.world_size
    num_addends = 2 * (prediction.num_tokens + world_size * prediction.num_micro_batches)
    terms = {name: prediction.terms(name, prediction.wide) for name in prediction.shapes}
    scale = max(float(magnitude(wide, world_size).max(initial=0.0)) for wide in terms.values())
    for name, wanted in prediction.truth.gradients.items():
        reference = Reference(
            wide=mean(terms[name], world_size),
            narrow=mean(prediction.terms(name, prediction.single), world_size),
            scale=scale,
        )
        findings.add(
            compare_with_truth(
                reference,
                wanted,
                num_addends=num_addends,
                elements=prediction.exact[name],
                where=f"{shown.action} meaning of the partition, gradient {name}",
            )
        )
    wide_losses, single_losses = (
        np.array(local.losses).reshape(-1, 1) for local in (prediction.wide, prediction.single)
    )
    findings.add(
        compare_with_truth(
            Reference(
                wide=mean(wide_losses, world_size),
                narrow=mean(single_losses, world_size),
                scale=float(magnitude(wide_losses, world_size)[0]),
            ),
            np.array([prediction.truth.loss]),
            num_addends=num_addends,
            elements=np.zeros(1, dtype=np.bool_),
            where=f"{shown.action} meaning of the partition, loss",
        )
    )
    return findings.verdict("exact" if prediction.certified else "calibrated")


def judge_exact(shown: ActionGradients, prediction: Prediction) -> Verdict:
    """Engine against truth where every legal order gives the same bits."""
    findings = Findings()
    for name in shown.assembled.full:
        findings.add(
            compare_exact(
                shown.got(name),
                prediction.truth.gradients[name],
                prediction.exact[name],
                where=f"{shown.action} exact gradient {name}",
            )
        )
    return findings.verdict("exact")


def _form_mismatches(
    where: str, name: str, tensor: Tensor | None, prediction: Prediction
) -> list[Mismatch]:
    if tensor is None:
        return []  # what an absent gradient means for its value is compared as zero
    wanted = prediction.numerics.shard_accumulate
    found = []
    if dtype_name(tensor.dtype) != wanted:
        found.append(Mismatch(where=where, got=dtype_name(tensor.dtype), wanted=wanted))
    if name not in prediction.trainable:
        found.append(Mismatch(where=where, got="a gradient", wanted="absent: it is frozen"))
    return found


def _compare_loss(where: str, got: float, prediction: Prediction, rank: int) -> Comparison:
    """A rank's total: its micro-batch losses added up in the dtype of the losses or a finer one."""
    losses = np.array(prediction.local.losses[rank])
    if not (np.isfinite(losses).all() and np.isfinite(got)):
        if np.isnan(losses.sum()) == np.isnan(got) and np.isinf(losses.sum()) == np.isinf(got):
            return Comparison()
        return Comparison(
            mismatch=Mismatch(where=where, got=repr(got), wanted=repr(float(losses.sum()))),
            margin=np.inf,
        )
    u = 2.0**-53 if prediction.numerics.compute == "float64" else 2.0**-24
    wanted = float(mean(losses[:, None], 1)[0])
    spread = prediction.loss_spread(rank)
    allowed = gamma(len(losses) - 1, u) * (float(np.abs(losses).sum()) + spread) + spread
    off = abs(got - wanted)
    margin: Any = 0.0 if off == 0.0 else (off / allowed if allowed else np.inf)
    if off <= allowed:
        return Comparison(margin=float(margin))
    return Comparison(
        mismatch=Mismatch(
            where=where, got=repr(got), wanted=repr(wanted), off=off, allowed=allowed
        ),
        margin=float(margin),
    )


def agreement_mismatches(evaluator: Evaluator, observation: Observation) -> list[Mismatch]:
    """Where replicas differ, in gradients or in the parameters after a step.

    Parts that do not assemble within a replica are mismatches as well.
    """
    case = evaluator.case
    found: list[Mismatch] = []
    for action in train_actions(case, observation):
        kinds = {"gradient": [record.gradients for record in action.records]}
        if any(record.stepped for record in action.records):
            kinds["parameter"] = [record.parameters for record in action.records]
        for kind, parts in kinds.items():
            where = f"{action} {kind}"
            assembled = assemble(parts, mesh=case.mesh, shapes=evaluator.shapes, where=where)
            found += [*assembled.mismatches, *replica_mismatches(assembled, where=where)]
    return found

"""The optimizer steps of a program: what every rank showed of them, put together.

And what a single process says of them beforehand: the norm of the mean gradient, the parameters
that no sequence used, whether a poisoned loss must show.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdp_engine.contract.actions import Poison
from fsdp_engine.contract.observation import Numerics, Observation, TrainRecord
from fsdp_engine.workload.batches import MicroBatch, local_batch
from oracles.arrays import Float64, float64_of
from oracles.assembly import Assembled, assemble
from oracles.evaluation import FLOAT64, Evaluator
from oracles.moments import Moment, moments
from oracles.norm import exact_norm
from oracles.plans import numerics_mismatches, plan_mismatches
from oracles.prediction import effective_numerics
from oracles.records import TrainAction, train_actions
from oracles.reduction import contributions, magnitude, mean
from oracles.replay import LocalGradients, replay
from oracles.rounding import EVALUATION, allowance
from oracles.verdict import Mismatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One action that asks for a step: full gradients before it and after it.

    `train` is the same as a training action; None for a poisoned one.
    """

    moment: Moment
    gradients: Assembled
    clipped: Assembled
    train: TrainAction | None

    def __str__(self) -> str:
        return str(self.moment)

    @property
    def records(self) -> tuple[TrainRecord, ...]:
        return self.moment.train_records

    @property
    def norms(self) -> tuple[float | None, ...]:
        """What every rank returned."""
        return tuple(record.norm for record in self.records)

    @property
    def taken(self) -> bool:
        """Whether any rank says that it stepped."""
        return any(record.stepped for record in self.records)

    @property
    def mismatches(self) -> list[Mismatch]:
        """Where the parts do not fit together."""
        return [
            *self.gradients.mismatches,
            *self.clipped.mismatches,
            *self.moment.mismatches,
        ]

    def present(self) -> dict[str, Float64]:
        """The trainable parameters' gradients that are there, in double, before clipping."""
        return {
            name: float64_of(tensor)
            for name, tensor in self.gradients.full.items()
            if tensor is not None and name not in self.moment.before.frozen
        }

    def moving(self, names: Container[str]) -> dict[str, Tensor]:
        """The clipped gradients, of these parameters, that the step applies."""
        if not self.taken:
            return {}
        return {
            name: tensor
            for name, tensor in self.clipped.full.items()
            if tensor is not None and name in names
        }


def steps(evaluator: Evaluator, observation: Observation) -> Iterator[Step]:
    """The program's steps, one after the other, as far as it can be followed."""
    case, shapes = evaluator.case, evaluator.shapes
    training = {action.index: action for action in train_actions(case, observation)}
    for moment in moments(evaluator, observation):
        shown = [record for record in moment.records if isinstance(record, TrainRecord)]
        if not any(record.norm is not None for record in shown):
            continue
        assembled = [
            assemble(parts, mesh=moment.before.mesh, shapes=shapes, where=f"{moment} {kind}")
            for kind, parts in (
                ("gradient", [record.gradients for record in shown]),
                ("clipped gradient", [record.clipped for record in shown]),
            )
        ]
        yield Step(
            moment=moment,
            gradients=assembled[0],
            clipped=assembled[1],
            train=training.get(moment.index),
        )


def replayed(evaluator: Evaluator, observation: Observation, step: Step) -> LocalGradients | None:
    """The local gradients of a step's batch; None where they cannot be known."""
    numerics, action = observation.numerics, step.train
    if action is None or not numerics.replayable:
        return None
    case = evaluator.case
    if plan_mismatches(case, action) or numerics_mismatches(case, numerics):
        return None  # another check accuses
    evaluator.freeze(step.moment.before.frozen)
    plans = [record.plan for record in action.records]
    effective = effective_numerics(numerics, action)
    return replay(evaluator, action.batch, plans, effective, step.moment.before.weights)


def replayed_norm(
    evaluator: Evaluator, numerics: Numerics, step: Step, local: LocalGradients
) -> tuple[float, float]:
    """The norm of the mean of the local gradients, and how far off a reduced gradient's may be.

    | ||G|| - ||R|| | <= ||G - R||, which the bound of the reduction limits element by element.
    """
    assert step.train is not None
    world_size = evaluator.case.mesh.world_size
    num_micro_batches = len(step.records[0].plan)
    bound = allowance(effective_numerics(numerics, step.train), num_micro_batches)
    means, allowed = {}, {}
    for name, shape in evaluator.shapes.items():
        terms = contributions(local, name, shape)
        means[name] = mean(terms, world_size)
        sizes = magnitude(terms, world_size)
        allowed[name] = bound.allowed(sizes, local.spread.get(name, 0.0))
    norm = exact_norm(means)
    return norm, (exact_norm(allowed) + norm * 2.0**-52) * (1.0 + EVALUATION)


def used_names(local: LocalGradients) -> frozenset[str]:
    """The parameters that some sequence of the batch gives a gradient."""
    used: frozenset[str] = frozenset()
    return used.union(*local.used)


def must_show(evaluator: Evaluator, moment: Moment) -> bool:
    """Whether the poisoned loss makes some gradient non-finite, however it is summed up.

    A sequence without loss tokens may be left out of the sum. Otherwise the sequence is run alone.
    """
    action = moment.action
    assert isinstance(action, Poison)
    case = evaluator.case
    batch = local_batch(case, action.batch, action.rank)
    if not batch.loss_tokens[action.sequence]:
        return False
    value = float(action.value)

    def total(losses: Tensor, micro_batch: MicroBatch) -> Tensor:
        return (losses * value * micro_batch.loss_mask.to(losses.dtype)).sum()

    evaluator.freeze(moment.before.frozen)
    alone = batch.select((action.sequence,))
    with evaluator.loaded(moment.before.weights, FLOAT64):
        gradients = evaluator.evaluate(alone, total).gradients
    return any(not bool(torch.isfinite(gradient).all()) for gradient in gradients.values())


def finite(norm: float | None) -> bool:
    """Whether a returned norm is a finite number."""
    return norm is not None and math.isfinite(norm)

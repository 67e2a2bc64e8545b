"""What the gradients of one training action should be: replay, truth and what is allowed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from fsdp_engine.contract.case import Case, Mesh
from fsdp_engine.contract.observation import Numerics
from oracles.arrays import Float64, Mask
from oracles.evaluation import Evaluator, Weights
from oracles.exactness import exact_elements
from oracles.records import TrainAction
from oracles.reduction import contributions, emulate, magnitude, mean
from oracles.replay import LocalGradients, replay, replay_float32, replay_float64
from oracles.rounding import Allowance, accumulation, allowance
from oracles.truth import Truth, truth


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One action's gradients as they should be.

    `local` is the replay under the declared numerics, `single` and `wide` the same in float32 and
    float64 throughout. `exact` are the certified elements per parameter. `numerics` are the
    effective ones: eager where the engine says that it fell back.
    """

    mesh: Mesh
    numerics: Numerics
    shapes: dict[str, tuple[int, ...]]
    trainable: frozenset[str]
    num_micro_batches: int
    num_tokens: int
    local: LocalGradients
    single: LocalGradients
    wide: LocalGradients
    truth: Truth
    exact: dict[str, Mask]
    allowance: Allowance

    @property
    def world_size(self) -> int:
        return self.mesh.world_size

    @property
    def certified(self) -> bool:
        """Whether every element of every gradient is exact."""
        return all(bool(mask.all()) for mask in self.exact.values())

    @property
    def certifies_anything(self) -> bool:
        """Whether an element that is not zero is exact."""
        gradients = self.truth.gradients
        return any(
            bool((mask & (gradients[name] != 0.0)).any()) for name, mask in self.exact.items()
        )

    def terms(self, name: str, local: LocalGradients | None = None) -> Float64:
        """A parameter's local gradients `[terms, *shape]` in double: declared or other ones."""
        return contributions(local or self.local, name, self.shapes[name])

    def allowed(self, name: str) -> Float64:
        """What the bound allows per element of a parameter's gradient."""
        sizes = magnitude(self.terms(name), self.world_size)
        return self.allowance.allowed(sizes, self.spread(name))

    def spread(self, name: str) -> float:
        """By how much the mean is not known: 0 where replay repeats itself, as on a host."""
        return self.local.spread.get(name, 0.0)

    def loss_spread(self, rank: int) -> float:
        """The same of the sum of a rank's losses."""
        return self.local.loss_spread.get(rank, 0.0)

    def mean(self, name: str) -> Float64:
        """The exact mean of the declared local gradients, rounded to double."""
        return mean(self.terms(name), self.world_size)

    def candidates(self, name: str) -> list[Tensor] | None:
        """Every gradient that the declared levels can round to, or None where that is not known."""
        if self.spread(name):
            return None
        return emulate(self.local, name, self.numerics, self.mesh)

    def accumulation_allowed(self, name: str) -> Float64:
        """What adding micro-batches up locally may change, per element.

        From an eager prediction's terms, which are the micro-batches' own gradients.
        """
        assert not self.numerics.deferred
        relative = accumulation(self.numerics, self.num_micro_batches)
        result: Float64 = relative * magnitude(self.terms(name), self.world_size)
        return result


def effective_numerics(numerics: Numerics, action: TrainAction) -> Numerics:
    """The numerics of this action: a declared fall-back to eager sync counts as eager."""
    return replace(numerics, deferred=numerics.deferred and not action.fell_back)


def predict(
    evaluator: Evaluator,
    action: TrainAction,
    numerics: Numerics,
    weights: Weights,
    known: Truth | None = None,
) -> Prediction:
    """Predict an action whose plan was accepted.

    `numerics` are the effective ones, `weights` those in storage dtype before the action. `known`
    is the truth where the caller has it from the same sequences in another partition.
    """
    case = evaluator.case
    plans = [record.plan for record in action.records]
    local = replay(evaluator, action.batch, plans, numerics, weights)
    wide = replay_float64(evaluator, action.batch, plans, numerics, weights)
    single = local
    if not _is_single(numerics):
        single = replay_float32(evaluator, action.batch, plans, numerics, weights)
    shapes = evaluator.shapes
    return Prediction(
        mesh=case.mesh,
        numerics=numerics,
        shapes=shapes,
        trainable=evaluator.trainable,
        num_micro_batches=len(plans[0]),
        num_tokens=sum(sequence.length for sequence in case.batches[action.batch].sequences),
        local=local,
        single=single,
        wide=wide,
        truth=known or truth(evaluator, action.batch, weights),
        exact=_exact(case, local, single, wide, numerics, shapes),
        allowance=allowance(numerics, len(plans[0])),
    )


def _is_single(numerics: Numerics) -> bool:
    dtypes = (numerics.storage, numerics.compute, numerics.local_accumulate)
    return all(dtype == "float32" for dtype in dtypes) and numerics.buffers in (None, "float32")


def _exact(  # noqa: PLR0917  the three replays belong together
    case: Case,
    local: LocalGradients,
    single: LocalGradients,
    wide: LocalGradients,
    numerics: Numerics,
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, Mask]:
    if not case.exact:
        return {name: np.zeros(shape, dtype=np.bool_) for name, shape in shapes.items()}
    narrow = single if numerics.compute == "float64" else local
    return {
        name: exact_elements(
            name, shape, narrow=narrow, wide=wide, numerics=numerics, mesh=case.mesh
        )
        for name, shape in shapes.items()
    }

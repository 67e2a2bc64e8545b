"""The gradient reductions that every engine owes: how often, over which axis, at least how large.

Eager sync reduces each unit once per micro-batch, deferred sync once per batch. That much is the
contract of the sharding itself, whatever wrapper does it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fsdp_engine.contract.case import Case
from fsdp_engine.contract.observation import Axis, Numerics, Operation
from oracles.sharding import ParameterLayout, unit_layouts


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One level of the reduction. `divisor`: into how many parts a gradient is cut before it."""

    operation: Operation
    axis: Axis
    group_size: int
    divisor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitReductions:
    """What one unit owes at every level.

    `least` to `most` reductions, each of at least `elements` gradient elements before it is cut.
    They differ where only part of the micro-batches or ranks use the unit.
    """

    unit: str
    least: int
    most: int
    elements: int


def predict_levels(case: Case) -> tuple[Level, ...]:
    """Reduce-scatter over the shards, then all-reduce over the replicas; none over one rank."""
    mesh = case.mesh
    scatter = Level(operation="reduce_scatter", axis="shard", group_size=mesh.shards, divisor=1)
    across = Level(
        operation="all_reduce", axis="replicate", group_size=mesh.replicas, divisor=mesh.shards
    )
    return tuple(level for level in (scatter, across) if level.group_size > 1)


def predict_reductions(
    case: Case,
    numerics: Numerics,
    gated: tuple[tuple[bool, ...], ...],
    *,
    deferred: bool,
) -> tuple[UnitReductions, ...]:
    """What each unit with trainable parameters owes for one training action.

    `gated[r][m]`: whether rank r's micro-batch m uses the model's optional part. The units are
    those the engine declares.
    """
    everywhere = [all(ranks) for ranks in zip(*gated, strict=True)]
    predicted = []
    for unit in numerics.units:
        members = _trainable(case, unit.parameters)
        if not members:
            continue
        always = [parameter for parameter, optional in members if not optional]
        surely = [bool(always) or used for used in everywhere]
        predicted.append(
            UnitReductions(
                unit=unit.name,
                least=min(sum(surely), 1) if deferred else sum(surely),
                # An engine may send zeros for what no rank used.
                most=1 if deferred else len(everywhere),
                elements=sum(
                    parameter.numel for parameter in always or [member for member, _ in members]
                ),
            )
        )
    return tuple(predicted)


def smallest_part(unit: UnitReductions, level: Level) -> int:
    """The fewest elements a reduction of the unit can have at that level."""
    return math.ceil(unit.elements / level.divisor)


def _trainable(case: Case, names: tuple[str, ...]) -> list[tuple[ParameterLayout, bool]]:
    """The trainable parameters among `names`, each with whether only gated sequences use it."""
    return [
        (parameter, parameter.optional or unit.optional)
        for unit in unit_layouts(case)
        for parameter in unit.parameters
        if parameter.trainable and parameter.name in names
    ]

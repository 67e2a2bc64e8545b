"""What a run of the default profile draws has every feature that a bug may depend on.

Features that only single rows or programs have are looked for in `test_strategies`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import TypeAlias, get_args

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from fsdp_engine.contract.actions import Train
from fsdp_engine.contract.batch import Batch, Static
from fsdp_engine.contract.case import Case, ConfigSource, LossMode
from oracles.planner import consecutive
from oracles.sharding import unit_layouts
from properties.covering import covering_array
from properties.profiles import PROFILES
from properties.strategies.cases import cases, stepping_cases
from properties.suite import drawn as suites_draw

Feature: TypeAlias = Callable[[Case], bool]

PROFILE = PROFILES["default"]
AT_LEAST = 2
"""A feature that only one case of the sample has is not drawn with another seed."""


@functools.cache
def sample() -> tuple[Case, ...]:
    """What one run of the default profile draws for a suite that trains and one that steps."""
    drawn: list[Case] = []
    rows = covering_array(strength=PROFILE.strength, max_world_size=PROFILE.max_world_size)
    for number, row in enumerate(rows):
        for strategy in (suites_draw(cases(row)), suites_draw(stepping_cases(row))):
            search = given(case=strategy)(lambda case: drawn.append(case))
            hypothesis.seed(number)(SETTINGS(search))()
    return tuple(drawn)


SETTINGS = settings(
    max_examples=PROFILE.examples,
    database=None,
    phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)


def _rows_of_parameters(case: Case) -> Iterator[int]:
    """Extent of the sharded dimension of every trainable parameter of the small families."""
    for unit in () if case.model.is_language else unit_layouts(case):
        for parameter in unit.trainable:
            yield parameter.shape[0]


def _per_rank(rows: int, shards: int) -> int:
    return math.ceil(rows / shards)


def _static_loss_tokens(case: Case) -> Iterator[list[int]]:
    """Loss tokens per micro-batch, for every rank of every batch of a fixed plan."""
    planning = case.engine.planning
    if isinstance(planning, Static):
        for batch in case.batches:
            for local in batch.ranks:
                parts = consecutive(len(local), planning.sequences)
                yield [sum(local[index].loss_tokens for index in part) for part in parts]


def _fewest_micro_batches(case: Case, batch: Batch) -> list[int]:
    """How many micro-batches each rank's tokens need at the least; empty for a fixed plan."""
    planning = case.engine.planning
    if isinstance(planning, Static):
        return []
    totals = [sum(sequence.length for sequence in local) for local in batch.ranks]
    return [math.ceil(total / planning.max_tokens) for total in totals]


FEATURES: dict[str, Feature] = {
    "a parameter that the shard group does not divide": lambda c: any(
        rows % c.mesh.shards for rows in _rows_of_parameters(c)
    ),
    "a parameter with fewer rows than shards": lambda c: any(
        rows < c.mesh.shards for rows in _rows_of_parameters(c)
    ),
    "an empty shard behind full ones": lambda c: any(
        rows >= c.mesh.shards > 1 and _per_rank(rows, c.mesh.shards) * (c.mesh.shards - 1) >= rows
        for rows in _rows_of_parameters(c)
    ),
    "a micro-batch without loss tokens": lambda c: any(
        0 in tokens and sum(tokens) for tokens in _static_loss_tokens(c)
    ),
    "a rank without loss tokens": lambda c: any(
        not any(sequence.loss_tokens for sequence in local)
        for batch in c.batches
        for local in batch.ranks
    ),
    "one micro-batch": lambda c: any(len(tokens) == 1 for tokens in _static_loss_tokens(c)),
    "four micro-batches": lambda c: any(len(tokens) == 4 for tokens in _static_loss_tokens(c)),
    "sequences of other lengths in one micro-batch": lambda c: any(
        len({sequence.length for sequence in local}) > 1
        for batch in c.batches
        for local in batch.ranks
    ),
    "ranks that need other numbers of micro-batches": lambda c: any(
        len(set(_fewest_micro_batches(c, batch))) > 1 for batch in c.batches
    ),
    "ranks with other numbers of sequences": lambda c: any(
        len({len(local) for local in batch.ranks}) > 1 for batch in c.batches
    ),
    "frozen parameters": lambda c: c.model.frozen != "none",
    "tied weights": lambda c: c.model.tied,
    "an adapter": lambda c: c.model.lora_rank > 0,
    "an adapter whose scale is no power of two": lambda c: (
        c.model.lora_rank > 0 and not (c.model.lora_alpha / c.model.lora_rank).is_integer()
    ),
    "buffers": lambda c: c.model.buffers,
    "biases": lambda c: c.model.bias,
    "more than one unit": lambda c: c.model.units > 1,
    "a part that some sequences do not use": lambda c: any(
        not sequence.gated for batch in c.batches for sequence in batch.sequences
    ),
    "a step": lambda c: any(isinstance(a, Train) and a.step for a in c.program),
    "another batch after a step": lambda c: any(
        isinstance(a, Train) and a.step and index + 1 < len(c.program)
        for index, a in enumerate(c.program)
    ),
    "AdamW": lambda c: c.optimizer.kind == "adamw",
    "weight decay": lambda c: c.optimizer.weight_decay > 0,
    "a norm that is hardly ever clipped": lambda c: c.optimizer.clip_grad > 1,
}


@pytest.mark.parametrize("feature", FEATURES.values(), ids=FEATURES)
def test_is_common(feature: Feature) -> None:
    assert sum(map(feature, sample())) >= AT_LEAST


@pytest.mark.parametrize("mode", get_args(LossMode))
def test_every_loss_mode_is_common(mode: LossMode) -> None:
    assert sum(case.engine.loss_mode == mode for case in sample()) >= AT_LEAST


@pytest.mark.parametrize("source", get_args(ConfigSource))
def test_every_configuration_source_is_common(source: ConfigSource) -> None:
    assert sum(case.engine.config_source == source for case in sample()) >= AT_LEAST

"""The mesh and strategy tables and the units' layout, and that a wrong entry is found."""

from __future__ import annotations

import pytest

from fsdp_engine.contract.model import Model
from fsdp_engine.contract.protocol import Answer
from oracles.sharding import (
    flat_elements,
    mesh_shape,
    per_parameter_elements,
    strategy_name,
    unit_layouts,
)
from properties.checks import strategy
from tests.observed import Answers, worked_case


@pytest.mark.parametrize(
    ("world_size", "fsdp_size", "shape"),
    [
        (8, -1, (8,)),
        (8, -2, (8,)),
        (8, 8, (8,)),
        (8, 70, (8,)),
        (1, 1, (1,)),
        (8, 4, (2, 4)),
        (8, 1, (8, 1)),
        (64, 2, (32, 2)),
        (8, 0, None),
        (1, 0, None),
        (3, 2, None),
        (6, 4, None),
    ],
)
def test_mesh_of_a_size(world_size: int, fsdp_size: int, shape: tuple[int, ...] | None) -> None:
    assert mesh_shape(world_size, fsdp_size) == shape


@pytest.mark.parametrize(
    ("ndim", "zero3", "name"),
    [
        (1, True, "FULL_SHARD"),
        (1, False, "SHARD_GRAD_OP"),
        (2, True, "HYBRID_SHARD"),
        (2, False, "_HYBRID_SHARD_ZERO2"),
        (0, True, None),
        (3, False, None),
    ],
)
def test_strategy_of_a_mesh(ndim: int, zero3: bool, name: str | None) -> None:  # noqa: FBT001
    assert strategy_name(ndim, zero3=zero3) == name


def test_elements_of_the_worked_example() -> None:
    root, unit, _ = unit_layouts(worked_case())
    assert [flat_elements(unit.parameters, shards, "bfloat16") for shards in (2, 4)] == [216, 216]
    assert [flat_elements(root.parameters, shards, "bfloat16") for shards in (2, 4)] == [1038, 1040]
    assert [flat_elements(u.parameters, 2, "float32") for u in (unit, root)] == [212, 1038]
    assert [per_parameter_elements(u.parameters, 2) for u in (unit, root)] == [212, 1054]
    assert [per_parameter_elements(u.parameters, 4) for u in (unit, root)] == [212, 1088]


def test_tied_pair_is_one_parameter_of_the_root() -> None:
    root, *_ = unit_layouts(worked_case(model=Model(family="embedding", tied=True)))
    assert [parameter.name for parameter in root.parameters] == ["embed.weight"]


def test_where_autograd_reaches() -> None:
    features = unit_layouts(worked_case(model=Model(family="mlp", units=3, frozen="first_unit")))
    assert [unit.input_needs_grad for unit in features[1:]] == [False, False, True]
    assert [unit.output_needs_grad for unit in features[1:]] == [False, True, True]
    tokens = unit_layouts(worked_case())
    assert [unit.input_needs_grad for unit in tokens[1:]] == [True, True]


CASE = worked_case()


def right_mesh(world_size: int, fsdp_size: int) -> Answer:
    shape = mesh_shape(world_size, fsdp_size)
    if shape is None:
        error = f"fsdp_size: {fsdp_size} is not legal"
        return Answer(value=None, error_kind="ConfigError", error=error)
    return Answer(value=shape)


def right_strategy(ndim: int, zero3: bool) -> Answer:  # noqa: FBT001  the protocol's order
    name = strategy_name(ndim, zero3=zero3)
    if name is None:
        error = f"mesh ndim {ndim}"
        return Answer(value=None, error_kind="NotImplementedError", error=error)
    return Answer(value=name)


def test_right_tables_pass() -> None:
    run = Answers(mesh_answer=right_mesh, strategy_answer=right_strategy)
    assert strategy.mesh_is_total(CASE, run).passed
    assert strategy.strategy_is_total(CASE, run).passed


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ((6, 4), Answer(value=(1, 4))),  # leftover ranks
        ((8, 0), Answer(value=None, error_kind="ZeroDivisionError", error="by zero")),
        ((8, 0), Answer(value=None, error_kind="ConfigError", error="fsdp_size is not legal")),
        ((8, 4), Answer(value=(4, 2))),
        ((8, 9), Answer(value=None, error_kind="ConfigError", error="fsdp_size: 9")),
        ((8, 1), Answer(value=(8,))),
    ],
)
def test_wrong_mesh_fails(question: tuple[int, int], answer: Answer) -> None:
    def spoilt(world_size: int, fsdp_size: int) -> Answer:
        asked = (world_size, fsdp_size)
        return answer if asked == question else right_mesh(world_size, fsdp_size)

    verdict = strategy.mesh_is_total(CASE, Answers(mesh_answer=spoilt))
    assert [mismatch.where for mismatch in verdict.mismatches] == [
        f"mesh of world size {question[0]}, fsdp_size {question[1]}"
    ]


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ((1, True), Answer(value="SHARD_GRAD_OP")),
        ((2, False), Answer(value="HYBRID_SHARD")),
        ((2, False), Answer(value="SHARD_GRAD_OP")),
        ((3, True), Answer(value="HYBRID_SHARD")),
        ((0, True), Answer(value=None, error_kind="NotImplementedError", error="no such mesh")),
        ((0, True), Answer(value=None, error_kind="KeyError", error="0")),
    ],
)
def test_wrong_strategy_fails(question: tuple[int, bool], answer: Answer) -> None:
    def spoilt(ndim: int, zero3: bool) -> Answer:  # noqa: FBT001  the protocol's order
        return answer if (ndim, zero3) == question else right_strategy(ndim, zero3)

    verdict = strategy.strategy_is_total(CASE, Answers(strategy_answer=spoilt))
    assert len(verdict.mismatches) == 1


def test_an_option_that_is_not_offered_is_not_judged() -> None:
    refused = Answer(value=None, error_kind="UnsupportedCase", error="no size option")
    run = Answers(mesh_answer=lambda *_: refused)
    assert strategy.mesh_is_total(CASE, run).outcome == "not_applicable"

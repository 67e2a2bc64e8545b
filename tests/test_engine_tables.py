"""Meshes, strategies, units and the learning rate of the reference engine: no ranks needed."""

from __future__ import annotations

import math

import pytest
from torch import nn

from fsdp_engine.contract.errors import ConfigError
from fsdp_engine.contract.model import Model
from fsdp_engine.engine.config import OptimizerConfig, WrapPolicy, warmup_steps
from fsdp_engine.engine.mesh import mesh_shape, require_mesh
from fsdp_engine.engine.schedule import lr_factor
from fsdp_engine.engine.sharding import get_sharding_strategy
from fsdp_engine.engine.units import find_units
from fsdp_engine.workload.models import build_model, unit_names
from tests.world_cases import world_case


@pytest.mark.parametrize("world_size", range(1, 17))
@pytest.mark.parametrize("fsdp_size", range(-2, 20))
def test_mesh_shape_is_total(world_size: int, fsdp_size: int) -> None:
    if fsdp_size < 0 or fsdp_size >= world_size:
        assert mesh_shape(world_size, fsdp_size) == (world_size,)
    elif fsdp_size and world_size % fsdp_size == 0:
        assert mesh_shape(world_size, fsdp_size) == (world_size // fsdp_size, fsdp_size)
    else:
        with pytest.raises(ConfigError, match=rf"fsdp_size: {fsdp_size} is not legal"):
            mesh_shape(world_size, fsdp_size)


@pytest.mark.parametrize("shape", [(3,), (2, 3), (0, 4), (-2, -2)])
def test_a_mesh_covers_the_world(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="mesh"):
        require_mesh(shape, world_size=4)


def test_a_mesh_has_one_or_two_dimensions() -> None:
    with pytest.raises(NotImplementedError, match="ndim 3"):
        require_mesh((1, 2, 2), world_size=4)


@pytest.mark.parametrize(
    ("ndim", "zero3", "name"),
    [
        (1, True, "FULL_SHARD"),
        (1, False, "SHARD_GRAD_OP"),
        (2, True, "HYBRID_SHARD"),
        (2, False, "_HYBRID_SHARD_ZERO2"),
    ],
)
def test_strategy_table(ndim: int, name: str, *, zero3: bool) -> None:
    assert get_sharding_strategy(ndim, zero3=zero3).name == name


@pytest.mark.parametrize("ndim", [0, 3, 4])
def test_other_meshes_have_no_strategy(ndim: int) -> None:
    with pytest.raises(NotImplementedError, match=f"ndim {ndim}"):
        get_sharding_strategy(ndim, zero3=True)


@pytest.mark.parametrize(
    "model",
    [
        Model(family="mlp", units=3),
        Model(family="embedding", units=2, tied=True),
        Model(family="mlp", units=2, lora_rank=1),
        Model(family="llama", units=2, width=8, lora_rank=1),
    ],
)
def test_units_are_the_layers_that_the_model_names(model: Model) -> None:
    case = world_case(model=model)
    module = build_model(case)
    units = find_units(module, WrapPolicy())
    wanted = {id(module.get_submodule(name)) for name in unit_names(case)} | {id(module)}
    assert {id(unit.module) for unit in units} == wanted
    assert units[-1].module is module
    slots = [slot for unit in units for slot in unit.slots]
    assert sorted(s.name for s in slots) == sorted(n for n, _ in module.named_parameters())


def test_units_by_size_own_enough_and_nothing_twice() -> None:
    module = build_model(world_case(model=Model(family="mlp", units=2, width=4, hidden=8)))
    units = find_units(module, WrapPolicy(min_num_params=33))
    assert [type(unit.module).__name__ for unit in units] == ["Block", "Block", "TorchModel"]
    assert [len(unit.slots) for unit in units] == [2, 2, 1]


@pytest.mark.parametrize(
    ("policy", "named"),
    [
        (WrapPolicy(transformer_layer_cls_to_wrap=("Block", "Absent")), "Absent"),
        (WrapPolicy(min_num_params=10**6), "min_num_params"),
        (WrapPolicy(transformer_layer_cls_to_wrap=("Embedding",)), "head.weight"),
    ],
)
def test_wrapping_that_cannot_be_is_refused(policy: WrapPolicy, named: str) -> None:
    module = build_model(world_case(model=Model(family="embedding", tied=True)))
    with pytest.raises(ConfigError, match=named):
        find_units(module, policy)


def test_a_model_that_names_no_layers_needs_a_policy() -> None:
    with pytest.raises(ConfigError, match="_no_split_modules"):
        find_units(nn.Sequential(nn.Linear(2, 2)), WrapPolicy())


def test_constant_schedule_rises_from_zero() -> None:
    config = OptimizerConfig(lr_warmup_steps=4)
    assert [lr_factor(config, step) for step in range(6)] == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    assert lr_factor(OptimizerConfig(lr_warmup_steps=0), 0) == 1.0


def test_warmup_by_ratio_only_where_no_steps_are_given() -> None:
    by_ratio = OptimizerConfig(lr_warmup_steps_ratio=0.25, total_training_steps=10)
    assert warmup_steps(by_ratio) == 2
    assert warmup_steps(OptimizerConfig()) == 0
    assert warmup_steps(OptimizerConfig(lr_warmup_steps=3)) == 3


def test_cosine_schedule() -> None:
    config = OptimizerConfig(
        lr_scheduler_type="cosine", lr_warmup_steps=2, total_training_steps=6, min_lr_ratio=0.5
    )
    got = [lr_factor(config, step) for step in range(7)]
    wave = [0.75 + 0.25 * math.cos(math.pi * step / 4) for step in range(5)]
    assert got == [0.0, 0.5, *(max(0.5, factor) for factor in wave)]

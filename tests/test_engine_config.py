"""The reference engine's configuration: entry points, refusals, and what a case becomes."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp_engine.adapters.reference import Reference, configs
from fsdp_engine.contract.batch import TokenBudget
from fsdp_engine.contract.case import DTYPE_POLICIES, ConfigSource, Scalar
from fsdp_engine.contract.errors import ConfigError
from fsdp_engine.engine.config import EngineConfig, MixedPrecision, OptimizerConfig, WrapPolicy
from fsdp_engine.engine.config_sources import (
    SYNC_FIELD,
    flatten,
    from_mapping,
    from_object,
    to_mapping,
    yaml_mapping,
)
from tests.world_cases import world_case

ILLEGAL_ENGINE: list[tuple[str, Any]] = [
    ("strategy", "fsdp3"),
    ("strategy", None),
    ("fsdp_size", 0),
    ("fsdp_size", 2.0),
    ("fsdp_size", True),
    ("reshard_after_forward", 1),
    (SYNC_FIELD, None),
    ("use_orig_params", False),
    ("forward_prefetch", "yes"),
    ("model_dtype", "fp16"),
    ("model_dtype", None),
    ("use_dynamic_bsz", 0),
    ("use_dynamic_bsz", True),  # without a budget
    ("micro_batch_size_per_gpu", 0),
    ("micro_batch_size_per_gpu", None),
    ("max_token_len_per_gpu", 16),  # without use_dynamic_bsz
    ("loss_agg_mode", "mean"),
    ("forward_only", None),
]
ILLEGAL_OPTIMIZER: list[tuple[str, Any]] = [
    ("optimizer", "Adam"),
    ("lr", -1.0),
    ("lr", math.nan),
    ("lr", None),
    ("weight_decay", math.inf),
    ("betas", (0.9,)),
    ("betas", (0.9, 1.0)),
    ("clip_grad", None),
    ("clip_grad", 0.0),
    ("clip_grad", -1.0),
    ("clip_grad", math.nan),
    ("clip_grad", True),
    ("lr_scheduler_type", "linear"),
    ("lr_scheduler_type", "cosine"),  # without total_training_steps
    ("lr_warmup_steps", None),
    ("lr_warmup_steps_ratio", 1.5),
    ("lr_warmup_steps_ratio", 0.5),  # of an unknown total
    ("total_training_steps", 10),  # nothing reads it
    ("min_lr_ratio", 0.5),  # constant schedule
    ("num_cycles", 1.0),  # constant schedule
]


@pytest.mark.parametrize(("name", "value"), ILLEGAL_ENGINE)
def test_illegal_engine_values_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name if name != "use_dynamic_bsz" else "bsz|token_len"):
        from_mapping(EngineConfig, {name: value})


@pytest.mark.parametrize(("name", "value"), ILLEGAL_OPTIMIZER)
def test_illegal_optimizer_values_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match="is not legal; legal is"):
        from_mapping(OptimizerConfig, {name: value})


@pytest.mark.parametrize(
    "raw",
    [
        {"strategy": "fsdp2", "use_orig_params": False},
        {"strategy": "fsdp2", "mixed_precision": {"buffer_dtype": "bf16"}},
        {"forward_only": True, SYNC_FIELD: True},
        {"use_dynamic_bsz": True, "max_token_len_per_gpu": 8, "micro_batch_size_per_gpu": 2},
        {"wrap_policy": {"min_num_params": 4, "transformer_layer_cls_to_wrap": ["Block"]}},
        {"wrap_policy": {"min_num_params": -1}},
        {"wrap_policy": {"transformer_layer_cls_to_wrap": []}},
        {"mixed_precision": {"param_dtype": "fp16"}},
        {"mixed_precision": None},
    ],
)
def test_inert_and_illegal_combinations_are_refused(raw: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        from_mapping(EngineConfig, raw)


@pytest.mark.parametrize(
    "raw",
    [
        {"optimizer": "SGD", "betas": [0.5, 0.5]},
        {"lr_warmup_steps": 2, "lr_warmup_steps_ratio": 0.5, "total_training_steps": 4},
    ],
)
def test_inert_optimizer_fields_are_refused(raw: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="where nothing reads it"):
        from_mapping(OptimizerConfig, raw)


def test_no_clipping_is_infinity() -> None:
    assert OptimizerConfig(clip_grad=math.inf).clip_grad == math.inf


@pytest.mark.parametrize(
    ("cls", "raw", "named"),
    [
        (EngineConfig, {"dtype": "bfloat16"}, "dtype: unknown field"),
        (EngineConfig, {"mixed_precision": {"dtype": "bf16"}}, "mixed_precision.dtype: unknown"),
        (OptimizerConfig, {"grad_clip": 1.0}, "grad_clip: unknown field"),
    ],
)
def test_unknown_fields_are_refused_with_their_path(cls: Any, raw: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        from_mapping(cls, raw)


def test_yaml_has_the_dataclass_defaults_field_by_field() -> None:
    defaults = Reference().defaults()
    assert defaults["yaml"] == defaults["dataclass"]
    assert defaults["yaml"][SYNC_FIELD] is False
    sections = yaml_mapping()
    assert from_mapping(EngineConfig, sections["engine"]) == EngineConfig()
    assert from_mapping(OptimizerConfig, sections["optim"]) == OptimizerConfig()


def test_engine_and_optimizer_fields_do_not_overlap() -> None:
    engine, optimizer = (
        {f.name for f in dataclasses.fields(c)} for c in (EngineConfig, OptimizerConfig)
    )
    assert not engine & optimizer


@pytest.mark.parametrize("text", ["a: [", "- 1", "other: {}"])
def test_a_file_without_the_two_sections_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="configuration file"):
        yaml_mapping(text)


def test_an_object_without_the_sync_field_means_deferred() -> None:
    old = SimpleNamespace(strategy="fsdp2", fsdp_size=2)
    assert from_object(old) == EngineConfig(
        strategy="fsdp2", fsdp_size=2, use_no_sync_for_gradient_accumulation=True
    )
    new = SimpleNamespace(use_no_sync_for_gradient_accumulation=False)
    assert from_object(new) == EngineConfig()


@pytest.mark.parametrize("source", ["dataclass", "yaml", "legacy"])
def test_every_source_of_a_case_gives_the_same_configuration(source: ConfigSource) -> None:
    case = world_case("fsdp1", deferred=True, dtypes=DTYPE_POLICIES["fp32/bf16/fp32"])
    options = dataclasses.replace(
        case.engine, config_source=source, planning=TokenBudget(max_tokens=8)
    )
    engine, optimizer = configs(dataclasses.replace(case, engine=options))
    assert engine == EngineConfig(
        strategy="fsdp",
        use_no_sync_for_gradient_accumulation=True,
        model_dtype="fp32",
        mixed_precision=MixedPrecision(param_dtype="bf16", reduce_dtype="fp32"),
        use_dynamic_bsz=True,
        max_token_len_per_gpu=8,
    )
    assert optimizer == OptimizerConfig(
        optimizer="SGD", lr=0.125, weight_decay=0.0, lr_warmup_steps=0
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("no_such_field", 1),
        ("fsdp_size", 0),
        ("clip_grad", None),
        ("strategy.x", 1),
        ("betas.0", 1.0),
        ("betas.2", 0.5),
    ],
)
def test_overrides_reach_the_raw_configuration(name: str, value: Scalar) -> None:
    case = world_case()
    options = dataclasses.replace(case.engine, overrides=((name, value),))
    with pytest.raises(ConfigError, match=name.removesuffix(".0")):
        configs(dataclasses.replace(case, engine=options))


def test_nested_overrides_leave_their_neighbours() -> None:
    case = world_case(dtypes=DTYPE_POLICIES["fp32/bf16/fp32"])
    overrides = (
        ("mixed_precision.reduce_dtype", "bf16"),
        ("wrap_policy.transformer_layer_cls_to_wrap", "Linear"),
    )
    options = dataclasses.replace(case.engine, overrides=overrides)
    engine, _ = configs(dataclasses.replace(case, engine=options))
    assert engine.mixed_precision == MixedPrecision(param_dtype="bf16", reduce_dtype="bf16")
    assert engine.wrap_policy == WrapPolicy(transformer_layer_cls_to_wrap=("Linear",))


def test_flatten_names_nested_values_and_sequences() -> None:
    flat = flatten(to_mapping(OptimizerConfig()))
    assert (flat["betas.0"], flat["betas.1"]) == (0.9, 0.999)
    assert "mixed_precision.param_dtype" in flatten(to_mapping(EngineConfig()))

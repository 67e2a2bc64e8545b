"""A case as verl's configuration objects, from each of its entry points."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import verl
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from verl.base_config import BaseConfig
from verl.trainer.config import CheckpointConfig
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig

from fsdp_engine.adapters.field_names import (
    DTYPES,
    SYNC,
    as_written,
    engine_fields,
    optimizer_fields,
)
from fsdp_engine.contract.batch import Static
from fsdp_engine.contract.case import Case, Scalar
from fsdp_engine.contract.errors import ConfigError

Fields = dict[str, Any]

PRECISION = "mixed_precision"
_FOLDER = Path(verl.__file__).parent / "trainer/config"
_YAML = {"engine": _FOLDER / "engine/fsdp.yaml", "optim": _FOLDER / "optim/fsdp.yaml"}
_OBJECTS = {"engine": FSDPEngineConfig, "optim": FSDPOptimizerConfig}

UNSEEN = (
    "_target_",  # the YAML file's name of its dataclass
    "dtype", "grad_offload",  # Megatron's
    "seed", "full_determinism",  # of the whole process
    "ulysses_sequence_parallel_size", "pad_to_length", "pad_to_length_bucket",  # packed only
    "use_remove_padding", "use_fused_kernels",  # no kernels for a CPU
    "entropy_from_logits_with_chunking", "entropy_from_logits_chunk_size",
    "entropy_checkpointing", "use_torch_compile",  # of the entropy, which is not asked for
    "infer_max_token_len_per_gpu", "infer_micro_batch_size_per_gpu",
    "use_dynamic_bsz_balance", "router_replay", "qat", "turbo_config", "mtp",
    "optimizer_impl", "override_optimizer_config", "zero_indexed_step",
    "warmup_style", "grad_clip",  # former names
)  # fmt: skip
"""Fields that nothing a case says or shows is about."""


def defaults(entry: str) -> dict[str, Scalar]:
    """Every field of an entry point (`dataclass`, `yaml`) that a case can be about, flat."""
    found: dict[str, Scalar] = {}
    for section in _sections(entry).values():
        seen = {name: value for name, value in section.items() if name not in UNSEEN}
        if seen.get(PRECISION) is None:
            seen.pop(PRECISION, None)  # its keys are what can be set
        found |= _flat(seen)
    return found


def known_field(name: str) -> bool:
    """Whether verl has a field of this (dotted) name; a made-up one is for verl to refuse."""
    head = name.split(".", maxsplit=1)[0]
    return any(head in section for section in _sections("dataclass").values())


def engine_and_optimizer(case: Case) -> tuple[Any, Any]:
    """The engine's and the optimizer's configuration, from the entry point that the case asks for.

    Raises:
        ConfigError: verl's own classes do not take it.
    """
    entry = "yaml" if case.engine.config_source == "yaml" else "dataclass"
    sections = _sections(entry)
    sections["engine"] |= _engine_fields(case)
    sections["optim"] |= optimizer_fields(case)
    for name, value in case.engine.overrides:
        _override(sections, name, value)
    optimizer = _built(FSDPOptimizerConfig, sections["optim"])
    if case.engine.config_source == "legacy":
        del sections["engine"][SYNC]
        return _legacy(sections["engine"]), optimizer
    return _built(FSDPEngineConfig, sections["engine"]), optimizer


def model_config(case: Case, folder: Path, targets: str | list[str] | None) -> HFModelConfig:
    """The model in `folder`, with eager attention and padded sequences; `targets` of an adapter."""
    return HFModelConfig(
        path=str(folder),
        load_tokenizer=False,
        override_config={
            "attn_implementation": "eager",
            "_experts_implementation": "eager",  # as the workload's: one expert after the other
        },
        use_remove_padding=False,
        enable_gradient_checkpointing=False,
        lora_rank=case.model.lora_rank,
        lora_alpha=case.model.lora_alpha,
        target_modules=targets,
        lora={"merge": False},
    )


def checkpoint_config() -> CheckpointConfig:
    """Model, optimizer and the rest, which is verl's default."""
    contents = ["model", "optimizer", "extra"]
    return CheckpointConfig(save_contents=contents, load_contents=contents)


def fsdp_size(case: Case) -> int | None:
    """The `fsdp_size` of which verl makes the case's mesh; None where there is none."""
    mesh = case.mesh
    if mesh.ndim == 1:
        return -1
    return mesh.shards if mesh.shards < mesh.world_size else None


def _engine_fields(case: Case) -> Fields:
    options, dtypes = case.engine, case.dtypes
    fields: Fields = engine_fields(case) | {
        "mixed_precision": {
            "param_dtype": DTYPES[dtypes.compute],
            "reduce_dtype": DTYPES[dtypes.reduce],
        },
        "fsdp_size": fsdp_size(case),
        "use_orig_params": options.strategy == "fsdp1",
        "use_torch_compile": False,
    }
    match options.planning:
        case Static(sequences=sequences, group=group):
            fields |= {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": sequences // group}
        case budget:
            fields |= {"use_dynamic_bsz": True, "max_token_len_per_gpu": budget.max_tokens}
    return fields


def _sections(entry: str) -> dict[str, Fields]:
    if entry == "yaml":
        return {name: OmegaConf.to_container(OmegaConf.load(path)) for name, path in _YAML.items()}
    return {name: _fields_of(made) for name, made in _OBJECTS.items()}


def _fields_of(made: Any) -> Fields:
    """The defaults of a configuration class, without what only its methods use."""
    built = made()
    return {
        field.name: getattr(built, field.name)
        for field in dataclasses.fields(built)
        if field.init and not field.name.startswith("_")
    }


def _legacy(fields: Fields) -> Any:
    """An object of the same fields without the one that switches deferral."""
    named = [(name, Any, dataclasses.field(default=None)) for name in fields]
    made = dataclasses.make_dataclass("LegacyEngineConfig", named, bases=(BaseConfig,))
    return made(**fields)


def _built(made: Any, fields: Fields) -> Any:
    """By the class itself, or as verl reads a YAML section, which names its class."""
    try:
        if "_target_" in fields:
            return omega_conf_to_dataclass(OmegaConf.create(fields))
        return made(**fields)
    except (AssertionError, TypeError, ValueError, HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"{made.__name__}: {error}") from error


def _override(sections: dict[str, Fields], name: str, value: Scalar) -> None:
    head, *rest = name.split(".")
    in_optim = head in _fields_of(FSDPOptimizerConfig)
    section = sections["optim" if in_optim else "engine"]
    section[head] = _replaced(section.get(head), rest, as_written(value))


def _replaced(old: Any, path: list[str], value: Scalar) -> Any:
    """`old` with the item at `path` exchanged: by its key, or by its place in a sequence."""
    if not path:
        return value
    first, *rest = path
    if isinstance(old, (list, tuple)):
        items = list(old)
        items[int(first)] = _replaced(items[int(first)], rest, value)
        return type(old)(items)
    mapping = dict(old or {})
    return mapping | {first: _replaced(mapping.get(first), rest, value)}


def _flat(section: Fields, prefix: str = "") -> dict[str, Scalar]:
    found: dict[str, Scalar] = {}
    for name, value in section.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{name}.")
        elif isinstance(value, (list, tuple)):
            found |= _flat(
                {str(place): item for place, item in enumerate(value)}, f"{prefix}{name}."
            )
        else:
            found[prefix + name] = value
    return found

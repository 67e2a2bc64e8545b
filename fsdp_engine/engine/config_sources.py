"""Where a configuration comes from: a mapping, the YAML file, or an object of an older version.

All three end in the same dataclasses, so the entry points cannot drift apart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from importlib import resources
from typing import Any, TypeVar

import yaml

from fsdp_engine.contract.errors import ConfigError
from fsdp_engine.engine.config import EngineConfig, MixedPrecision, OptimizerConfig, WrapPolicy

Config = TypeVar("Config", EngineConfig, OptimizerConfig, MixedPrecision, WrapPolicy)

SYNC_FIELD = "use_no_sync_for_gradient_accumulation"
_NESTED: dict[str, Any] = {"mixed_precision": MixedPrecision, "wrap_policy": WrapPolicy}
_SECTIONS: tuple[str, ...] = ("engine", "optim")
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The one in C where PyYAML was built with it: ten times faster."""


def from_mapping(cls: type[Config], raw: Mapping[str, Any], *, where: str = "") -> Config:
    """Build a configuration; absent fields have their defaults.

    Raises:
        ConfigError: an unknown field, named with the legal ones, or an illegal value.
    """
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{where.rstrip('.')}: {raw!r} is not legal; legal is a mapping")
    names = [f.name for f in dataclasses.fields(cls)]
    unknown = [name for name in raw if name not in names]
    if unknown:
        raise ConfigError(f"{where}{unknown[0]}: unknown field; legal are {', '.join(names)}")
    values = dict(raw)
    for name, value in values.items():
        if name in _NESTED and not dataclasses.is_dataclass(value):
            values[name] = from_mapping(_NESTED[name], value, where=f"{where}{name}.")
        elif isinstance(value, list):
            values[name] = tuple(value)
        elif name == "transformer_layer_cls_to_wrap" and isinstance(value, str):
            values[name] = (value,)
    return cls(**values)


def from_object(source: object) -> EngineConfig:
    """Read an engine configuration from an object's attributes.

    An object without the field that switches deferral comes from before there was a switch, when
    gradients were always reduced at the last micro-batch only: there the absent field means True.
    Other absent fields have their defaults.
    """
    names = [f.name for f in dataclasses.fields(EngineConfig)]
    raw = {name: getattr(source, name) for name in names if hasattr(source, name)}
    raw.setdefault(SYNC_FIELD, True)
    return from_mapping(EngineConfig, raw)


def to_mapping(config: Config) -> dict[str, Any]:
    """The configuration as nested plain values."""
    return dataclasses.asdict(config)


def yaml_mapping(text: str | None = None) -> dict[str, dict[str, Any]]:
    """The sections `engine` and `optim` of a YAML text, by default of the file that is shipped.

    Raises:
        ConfigError: not YAML, or not these two sections.
    """
    if text is None:
        text = resources.files("fsdp_engine.engine").joinpath("fsdp.yaml").read_text("utf-8")
    try:
        raw = yaml.load(text, Loader=_LOADER)
    except yaml.YAMLError as error:
        raise ConfigError(f"configuration file: not YAML ({error})") from error
    if not isinstance(raw, dict) or not set(raw) <= set(_SECTIONS):
        found = list(raw) if isinstance(raw, dict) else raw
        raise ConfigError(f"configuration file: {found!r}; legal are the sections engine and optim")
    return {section: raw.get(section) or {} for section in _SECTIONS}


def flatten(raw: Mapping[str, Any], *, where: str = "") -> dict[str, Any]:
    """Nested mappings as one, with dotted names; sequences by their index."""
    flat: dict[str, Any] = {}
    for name, value in raw.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, where=f"{where}{name}.")
        elif isinstance(value, (list, tuple)):
            indexed = {str(index): item for index, item in enumerate(value)}
            flat |= flatten(indexed, where=f"{where}{name}.")
        else:
            flat[where + name] = value
    return flat

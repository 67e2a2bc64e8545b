"""The reference engine behind the protocol: a case in the words of its configuration."""

from __future__ import annotations

import dataclasses
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from fsdp_engine.adapters.field_names import (
    DTYPES,
    STRATEGIES,
    as_written,
    engine_fields,
    optimizer_fields,
)
from fsdp_engine.adapters.numerics import divide_factors, fsdp1_numerics, fsdp2_numerics
from fsdp_engine.adapters.optional_units import run_the_same_units
from fsdp_engine.contract.actions import ACTIONS
from fsdp_engine.contract.batch import Static
from fsdp_engine.contract.case import Case, Scalar
from fsdp_engine.contract.errors import ConfigError
from fsdp_engine.contract.observation import Level, Numerics
from fsdp_engine.contract.protocol import Capabilities, RankContext
from fsdp_engine.engine.config import EngineConfig, OptimizerConfig
from fsdp_engine.engine.config_sources import (
    SYNC_FIELD,
    flatten,
    from_mapping,
    from_object,
    to_mapping,
    yaml_mapping,
)
from fsdp_engine.engine.engine import FsdpEngine
from fsdp_engine.engine.mesh import mesh_shape
from fsdp_engine.engine.micro_batches import plans_of
from fsdp_engine.engine.sharding import get_sharding_strategy, replicates
from fsdp_engine.workload.models import build_model, module_arguments

RawConfig = dict[str, Any]


class Reference:
    """The engine in `fsdp_engine/engine`."""

    def capabilities(self) -> Capabilities:
        return Capabilities(
            name="reference",
            versions={"torch": torch.__version__},
            strategies=tuple(STRATEGIES),
            actions=ACTIONS,
        )

    def supports(self, case: Case) -> str | None:
        if "float16" in (case.dtypes.storage, case.dtypes.compute, case.dtypes.reduce):
            return "the reference engine has no loss scaling, so no float16"
        if case.model.optional == "unit" and not _ranks_run_the_same_units(case):
            return (
                "some ranks run the optional unit in a micro-batch in which others do not: FSDP's "
                "forward gathers a unit on all ranks or on none"
            )
        return None

    def numerics(self, case: Case) -> Numerics:
        """Those of torch's wrapper, with the norm in fp64 and two cases apart.

        FSDP1 with one shard runs as NO_SHARD: one sum over all ranks. With parameters that are
        used now and then the reductions carry explicit zeros, which is not plain FSDP's list.
        """
        fsdp1 = case.engine.strategy == "fsdp1"
        plain = (fsdp1_numerics if fsdp1 else fsdp2_numerics)(case)
        numerics = dataclasses.replace(plain, norm="float64")
        if fsdp1 and replicates(case.mesh.shape) and case.mesh.world_size > 1:
            before, after = divide_factors(case.mesh.world_size)
            level = Level(
                axis="replicate",
                size=case.mesh.world_size,
                before=before,
                after=after,
            )
            return dataclasses.replace(numerics, levels=(level,), semantics="")
        if case.model.optional != "none":
            return dataclasses.replace(numerics, semantics="")
        return numerics

    def defaults(self) -> dict[str, dict[str, Scalar]]:
        """Engine and optimizer fields under one roof: their names do not overlap."""
        sections = yaml_mapping()
        return {
            "dataclass": flatten(to_mapping(EngineConfig()))
            | flatten(to_mapping(OptimizerConfig())),
            "yaml": flatten(sections["engine"]) | flatten(sections["optim"]),
        }

    def mesh_shape(self, world_size: int, fsdp_size: int) -> tuple[int, ...]:
        return mesh_shape(world_size, fsdp_size)

    def strategy(self, mesh_ndim: int, *, zero3: bool) -> str:
        return get_sharding_strategy(mesh_ndim, zero3=zero3).name

    def build(self, case: Case, rank: RankContext) -> FsdpEngine:
        engine, optimizer = configs(case)
        overridden = any(name == "fsdp_size" for name, _ in case.engine.overrides)
        return FsdpEngine(
            build_model(case),
            engine,
            optimizer,
            device=torch.device(rank.device),
            module_arguments=partial(module_arguments, case),
            shape=None if overridden or _named_size(case) is not None else case.mesh.shape,
        )


def configs(case: Case) -> tuple[EngineConfig, OptimizerConfig]:
    """The case's configuration, from the entry point it asks for.

    Raises:
        ConfigError: the configuration is illegal, or an override names no field.
    """
    sections = {"engine": to_mapping(EngineConfig()), "optim": to_mapping(OptimizerConfig())}
    if case.engine.config_source == "yaml":
        sections = yaml_mapping()
    sections["engine"] |= _engine_fields(case)
    sections["optim"] |= optimizer_fields(case)
    for name, value in case.engine.overrides:
        _override(sections, name, value)
    optimizer = from_mapping(OptimizerConfig, sections["optim"])
    if case.engine.config_source == "legacy":
        legacy = {name: value for name, value in sections["engine"].items() if name != SYNC_FIELD}
        return from_object(SimpleNamespace(**legacy)), optimizer
    return from_mapping(EngineConfig, sections["engine"]), optimizer


def _ranks_run_the_same_units(case: Case) -> bool:
    planning = case.engine.planning
    config = (
        EngineConfig(micro_batch_size_per_gpu=planning.sequences)
        if isinstance(planning, Static)
        else EngineConfig(
            use_dynamic_bsz=True,
            max_token_len_per_gpu=planning.max_tokens,
            force_group_size=planning.group,
        )
    )
    return run_the_same_units(case, lambda lengths: plans_of(lengths, config))


def _engine_fields(case: Case) -> RawConfig:
    options, dtypes = case.engine, case.dtypes
    fields: RawConfig = engine_fields(case) | {"loss_agg_mode": options.loss_mode}
    size = _named_size(case)
    if size is not None:
        fields["fsdp_size"] = size
    if dtypes.mixed:
        fields["mixed_precision"] = {
            "param_dtype": DTYPES[dtypes.compute],
            "reduce_dtype": DTYPES[dtypes.reduce],
            "buffer_dtype": None,
        }
    match options.planning:
        case Static(sequences=sequences):  # in order, so groups stay together by themselves
            fields |= {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": sequences}
        case budget:
            fields |= {
                "use_dynamic_bsz": True,
                "max_token_len_per_gpu": budget.max_tokens,
                "force_group_size": budget.group,
            }
    return fields


def _named_size(case: Case) -> int | None:
    """The `fsdp_size` that gives the case's mesh, None where no size does."""
    mesh = case.mesh
    size = -1 if mesh.ndim == 1 else mesh.shards
    return size if mesh_shape(mesh.world_size, size) == mesh.shape else None


def _override(sections: dict[str, RawConfig], name: str, value: Scalar) -> None:
    head, *rest = name.split(".")
    fields = {f.name for f in dataclasses.fields(OptimizerConfig)}
    section = sections["optim" if head in fields else "engine"]
    section[head] = _replaced(section.get(head), rest, as_written(value), name)


def _replaced(old: Any, path: list[str], value: Scalar, name: str) -> Any:
    """`old` with the item at `path` exchanged: by its key, or by its place in a sequence."""
    if not path:
        return value
    first, *rest = path
    if isinstance(old, dict):
        return {**old, first: _replaced(old.get(first), rest, value, name)}
    if isinstance(old, (list, tuple)) and first in map(str, range(len(old))):
        items = list(old)
        items[int(first)] = _replaced(items[int(first)], rest, value, name)
        return items
    raise ConfigError(f"{name}: unknown field; there is no {first} in {old!r}")

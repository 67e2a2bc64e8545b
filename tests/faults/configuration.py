"""Faults in what a configuration means and in what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_engine.adapters import reference as adapter
from fsdp_engine.contract.case import Case, LossMode, Scalar
from fsdp_engine.contract.protocol import RankContext
from fsdp_engine.engine import engine as engine_module
from fsdp_engine.engine import optimization
from fsdp_engine.engine.config import OptimizerConfig
from fsdp_engine.engine.config_sources import SYNC_FIELD, from_mapping
from fsdp_engine.engine.engine import FsdpEngine
from fsdp_engine.engine.normalise import GlobalCounts, normalise
from fsdp_engine.engine.step import make_optimizer
from tests.faults.planting import Planted, plant


class YamlDefersByDefault(Planted):
    """The YAML file and the dataclass have different defaults for the sync switch."""

    def defaults(self) -> dict[str, dict[str, Scalar]]:
        entry_points = super().defaults()
        entry_points["yaml"][SYNC_FIELD] = True
        return entry_points

    def plant_faults(self, case: Case) -> None:
        """The default alone is wrong."""


class ClipUnchecked(Planted):
    """Any `clip_grad` is accepted: zero, negative and NaN as well."""

    def plant_faults(self, case: Case) -> None:  # noqa: ARG002
        plant(adapter, "from_mapping", _without_clip_check)


def _without_clip_check(cls: Any, raw: Mapping[str, Any]) -> Any:
    if cls is not OptimizerConfig:
        return from_mapping(cls, raw)
    config = from_mapping(OptimizerConfig, {**raw, "clip_grad": 1.0})
    object.__setattr__(config, "clip_grad", raw.get("clip_grad", 1.0))
    return config


class LossModeNotPassedOn(Planted):
    """The aggregation mode is configured, checked, and never used."""

    def plant_faults(self, case: Case) -> None:  # noqa: ARG002
        plant(engine_module, "normalise", _always_token_mean)


def _always_token_mean(
    token_losses: Tensor, loss_mask: Tensor, _mode: LossMode, counts: GlobalCounts
) -> Tensor:
    return normalise(token_losses, loss_mask, "token-mean", counts)


class RefusedTooLate(Planted):
    """The configuration is checked after the mesh was built: ranks have communicated by then."""

    def build(self, case: Case, rank: RankContext) -> FsdpEngine:
        dist.all_reduce(torch.zeros(1))
        return super().build(case, rank)

    def plant_faults(self, case: Case) -> None:
        """The order alone is wrong."""


class UnknownFieldIgnored(Planted):
    """Fields that nothing reads are dropped without a word."""

    def plant_faults(self, case: Case) -> None:  # noqa: ARG002
        plant(adapter, "from_mapping", _dropping_unknown)


def _dropping_unknown(cls: Any, raw: Mapping[str, Any]) -> Any:
    names = {f.name for f in dataclasses.fields(cls)}
    return from_mapping(cls, {name: value for name, value in raw.items() if name in names})


class WeightDecayNotPassedOn(Planted):
    """`weight_decay` is accepted and never reaches the optimizer."""

    def plant_faults(self, case: Case) -> None:  # noqa: ARG002
        plant(optimization, "make_optimizer", _without_decay)


def _without_decay(module: torch.nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    return make_optimizer(module, dataclasses.replace(config, weight_decay=0.0))


class FieldNobodyReads(Planted):
    """A new field with the same default everywhere, which nothing in the engine reads."""

    def defaults(self) -> dict[str, dict[str, Scalar]]:
        return {
            entry_point: fields | {"grad_offload": False}
            for entry_point, fields in super().defaults().items()
        }

    def plant_faults(self, case: Case) -> None:
        """The field alone is wrong."""

"""Faults in the mesh, the sharding strategy, and in what stays resident."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, ShardingStrategy

from fsdp_engine.contract.case import Case
from fsdp_engine.engine import engine as engine_module
from fsdp_engine.engine import wrap as wrap_module
from fsdp_engine.engine.config import EngineConfig
from fsdp_engine.engine.mesh import mesh_shape
from fsdp_engine.engine.sharding import get_sharding_strategy
from fsdp_engine.engine.units import Unit
from fsdp_engine.engine.wrap import wrap
from tests.faults.planting import Planted, plant


class StrategyRowsSwapped(Planted):
    """The strategies of a 2-D mesh are exchanged: ZeRO-3 where ZeRO-2 was asked."""

    def strategy(self, mesh_ndim: int, *, zero3: bool) -> str:
        return _swapped(mesh_ndim, zero3=zero3).name

    def plant_faults(self, case: Case) -> None:  # noqa: ARG002
        plant(wrap_module, "get_sharding_strategy", _swapped)


def _swapped(mesh_ndim: int, *, zero3: bool) -> ShardingStrategy:
    return get_sharding_strategy(mesh_ndim, zero3=not zero3 if mesh_ndim == 2 else zero3)


class ReshardIgnoredOn2dMesh(Planted):
    """`reshard_after_forward=False` is not handed on where there are replicas."""

    def plant_faults(self, case: Case) -> None:  # noqa: ARG002
        plant(engine_module, "wrap", _wrap_always_resharding)


def _wrap_always_resharding(
    units: tuple[Unit, ...], config: EngineConfig, mesh: DeviceMesh, device: torch.device
) -> nn.Module:
    reshard = config.reshard_after_forward or mesh.ndim == 2
    return wrap(units, dataclasses.replace(config, reshard_after_forward=reshard), mesh, device)


class OneUnitStaysGathered(Planted):
    """One unit of FSDP2 is not resharded after its forward."""

    def plant_faults(self, case: Case) -> None:  # noqa: ARG002
        plant(engine_module, "wrap", _wrap_first_unit_gathered)


def _wrap_first_unit_gathered(
    units: tuple[Unit, ...], config: EngineConfig, mesh: DeviceMesh, device: torch.device
) -> nn.Module:
    root = wrap(units, config, mesh, device)
    if isinstance(units[0].module, FSDPModule):
        units[0].module.set_reshard_after_forward(False, recurse=False)
    return root


class MeshFloored(Planted):
    """A size that does not divide the world gives a mesh that some ranks are not in."""

    def mesh_shape(self, world_size: int, fsdp_size: int) -> tuple[int, ...]:
        if 0 < fsdp_size < world_size:
            return (world_size // fsdp_size, fsdp_size)
        return mesh_shape(world_size, fsdp_size)

    def plant_faults(self, case: Case) -> None:
        """The table alone is wrong."""

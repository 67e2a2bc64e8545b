"""Faults in over which ranks, and in which dtype, gradients are reduced."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_engine.adapters import reference as adapter
from fsdp_engine.contract.case import Case
from fsdp_engine.contract.protocol import LocalShard, Losses, TokenLoss
from fsdp_engine.engine import engine as engine_module
from fsdp_engine.engine import wrap as wrap_module
from fsdp_engine.engine.config import EngineConfig
from fsdp_engine.engine.engine import FsdpEngine
from fsdp_engine.engine.units import Unit
from fsdp_engine.engine.wrap import wrap
from fsdp_engine.workload.batches import LocalBatch
from tests.faults.planting import Planted, plant


class OneRankShardGroup(Planted):
    """FSDP1 on a (W, 1) mesh reduces over the shard axis, which is one rank."""

    def plant_faults(self, case: Case) -> None:  # noqa: ARG002
        plant(wrap_module, "replicates", _never)
        plant(engine_module, "replicates", _never)


def _never(_shape: tuple[int, ...]) -> bool:
    return False


class ReplicasAveragedTwice(Planted):
    """Gradients are divided by the number of replicas once more on 2-D meshes."""

    def plant_faults(self, case: Case) -> None:  # noqa: ARG002
        plant(adapter, "FsdpEngine", _DividesAgain)


class _DividesAgain(FsdpEngine):
    def forward_backward(self, batch: LocalBatch, loss: TokenLoss) -> Losses:
        losses = super().forward_backward(batch, loss)
        if self._mesh.ndim == 2:
            for parameter in self.module.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(self._mesh.shape[0])
        return losses


class ReplicaAxisDropped(Planted):
    """One class of units is wrapped over the shard axis alone: replicas go their own ways."""

    def plant_faults(self, case: Case) -> None:  # noqa: ARG002
        plant(engine_module, "wrap", _wrap_first_unit_apart)


def _wrap_first_unit_apart(
    units: tuple[Unit, ...], config: EngineConfig, mesh: DeviceMesh, device: torch.device
) -> nn.Module:
    if config.strategy == "fsdp2" and mesh.ndim == 2 and len(units) > 1:
        torch.distributed.fsdp.fully_shard(units[0].module, mesh=mesh["shard"])
        return wrap(units[1:], config, mesh, device)
    return wrap(units, config, mesh, device)


class ReducedInComputeDtype(Planted):
    """The reduce dtype of the policy is dropped: gradients are reduced in the compute dtype."""

    def plant_faults(self, case: Case) -> None:  # noqa: ARG002
        plant(engine_module, "wrap", _wrap_without_reduce_dtype)


def _wrap_without_reduce_dtype(
    units: tuple[Unit, ...], config: EngineConfig, mesh: DeviceMesh, device: torch.device
) -> nn.Module:
    precision = config.mixed_precision
    faulty = dataclasses.replace(precision, reduce_dtype=precision.param_dtype)
    return wrap(units, dataclasses.replace(config, mixed_precision=faulty), mesh, device)


class DividedByShardSize(Planted):
    """An average that divides by the number of elements of the shard instead of by ranks."""

    def plant_faults(self, case: Case) -> None:  # noqa: ARG002
        plant(adapter, "FsdpEngine", _DividesByElements)


class _DividesByElements(FsdpEngine):
    def gradients(self) -> Iterator[LocalShard]:
        for shard in super().gradients():
            if shard.data is not None and shard.data.numel():
                shard.data.mul_(self._mesh.size() / shard.data.numel())
            yield shard


class ParameterNotReduced(Planted):
    """One trainable parameter is left out of the wrapper: each rank keeps its own gradient."""

    def plant_faults(self, case: Case) -> None:  # noqa: ARG002
        plant(adapter, "FsdpEngine", _RankOwnGradient)


class _RankOwnGradient(FsdpEngine):
    def forward_backward(self, batch: LocalBatch, loss: TokenLoss) -> Losses:
        losses = super().forward_backward(batch, loss)
        trained = [p for p in self.module.parameters() if p.grad is not None]
        trained[0].grad.mul_(1 + torch.distributed.get_rank())  # type: ignore[union-attr]  # filtered above
        return losses


class SmallScaleError(Planted):
    """Gradients are too large by one part in 2^20, far below what a tolerance for bf16 sees."""

    def plant_faults(self, case: Case) -> None:  # noqa: ARG002
        plant(adapter, "FsdpEngine", _ScalesSlightly)


class _ScalesSlightly(FsdpEngine):
    def gradients(self) -> Iterator[LocalShard]:
        for shard in super().gradients():
            if shard.data is not None:
                shard.data.mul_(1 + 2.0**-20)
            yield shard

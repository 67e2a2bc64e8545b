"""Faults in the gradients of some parameters: which shard, which rows, which experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_engine.adapters import reference as adapter
from fsdp_engine.contract.observation import Shard
from fsdp_engine.contract.protocol import LocalShard
from fsdp_engine.engine.engine import FsdpEngine
from tests.faults.planting import Planted


class _KeepsNextShard(FsdpEngine):
    def gradients(self) -> Iterator[LocalShard]:
        num_shards = self._mesh.shape[-1]
        for shard in super().gradients():
            even = isinstance(shard.placement, Shard) and shard.full_shape[0] % num_shards == 0
            if even and shard.data is not None and not self._config.reshard_after_forward:
                yield replace(shard, data=self._next(shard.data))
            else:
                yield shard

    def _next(self, own: Tensor) -> Tensor:
        group = self._mesh.get_group("shard")
        shards = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(shards, own.contiguous(), group=group)
        return shards[(dist.get_rank(group) + 1) % len(shards)]


class NextShardKept(Planted):
    """In one stage every rank keeps the reduced shard of its neighbour."""

    exchanged = ((adapter, "FsdpEngine", _KeepsNextShard),)


class _HalvesExperts(FsdpEngine):
    def gradients(self) -> Iterator[LocalShard]:
        in_bf16 = self._config.mixed_precision.param_dtype == "bf16"
        for shard in super().gradients():
            if in_bf16 and "experts" in shard.name and shard.data is not None:
                shard.data.mul_(0.5)
            yield shard


class ExpertsDividedInBf16(Planted):
    """Gradients of experts are divided once more, in one precision mode."""

    exchanged = ((adapter, "FsdpEngine", _HalvesExperts),)


class _SkipsLocalRow(FsdpEngine):
    def gradients(self) -> Iterator[LocalShard]:
        for shard in super().gradients():
            rows = isinstance(shard.placement, Shard) and "embed" in shard.name
            if rows and shard.data is not None:
                shard.data[:1].zero_()
            yield shard


class PaddingRowOnEveryRank(Planted):
    """The row of the padding token is left out by its global index on every rank's local rows."""

    exchanged = ((adapter, "FsdpEngine", _SkipsLocalRow),)


class _TrainsFirstRows(FsdpEngine):
    def gradients(self) -> Iterator[LocalShard]:
        for shard in super().gradients():
            if "lora_" in shard.name and shard.data is not None and dist.get_rank():
                shard.data.zero_()
            yield shard


class AdapterOnFirstRankOnly(Planted):
    """Only rank 0's rows of an adapter ever get a gradient."""

    exchanged = ((adapter, "FsdpEngine", _TrainsFirstRows),)

"""Faults in weight export."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fsdp_engine.adapters import reference as adapter
from fsdp_engine.contract.actions import Export
from fsdp_engine.contract.case import Case
from fsdp_engine.engine.engine import FsdpEngine
from fsdp_engine.torch_private.shards import plain_name
from tests.faults.planting import Planted, plant

Named = Iterator[tuple[str, Tensor]]


class BuffersForgotten(Planted):
    """Only parameters are exported."""

    def plant_faults(self, case: Case) -> None:  # noqa: ARG002
        plant(adapter, "FsdpEngine", _WithoutBuffers)


class _WithoutBuffers(FsdpEngine):
    def export(self, action: Export) -> Named:
        buffers = {name for name, _ in self.module.named_buffers()}
        for name, tensor in super().export(action):
            if not any(buffer.endswith(name) for buffer in buffers):
                yield name, tensor


class ExportedInBf16(Planted):
    """Weights are cast to bf16 on their way out."""

    def plant_faults(self, case: Case) -> None:  # noqa: ARG002
        plant(adapter, "FsdpEngine", _Casts)


class _Casts(FsdpEngine):
    def export(self, action: Export) -> Named:
        for name, tensor in super().export(action):
            yield name, tensor.bfloat16() if tensor.is_floating_point() else tensor


class StagedInBf16(Planted):
    """The staged path has a dtype policy of its own."""

    def plant_faults(self, case: Case) -> None:  # noqa: ARG002
        plant(adapter, "FsdpEngine", _RoundsStaged)


class _RoundsStaged(FsdpEngine):
    def export(self, action: Export) -> Named:
        for name, tensor in super().export(action):
            rounds = action.staging == "force" and tensor.is_floating_point()
            yield name, tensor.bfloat16().to(tensor.dtype) if rounds else tensor


class TiedAliasDropped(Planted):
    """A tied weight is exported under one of its names only."""

    def plant_faults(self, case: Case) -> None:  # noqa: ARG002
        plant(adapter, "FsdpEngine", _WithoutAliases)


class _WithoutAliases(FsdpEngine):
    def export(self, action: Export) -> Named:
        seen: set[str] = set()
        first_names = {entry.name: entry.parameter for entry in self.weights.plan.entries}
        for name, tensor in super().export(action):
            parameter = first_names[name]
            if parameter is None or parameter not in seen:
                yield name, tensor
            if parameter is not None:
                seen.add(parameter)


class EmbeddingSkipped(Planted):
    """A filter on names drops everything that contains `embed`."""

    def plant_faults(self, case: Case) -> None:  # noqa: ARG002
        plant(adapter, "FsdpEngine", _WithoutEmbedding)


class _WithoutEmbedding(FsdpEngine):
    def export(self, action: Export) -> Named:
        return ((name, tensor) for name, tensor in super().export(action) if "embed" not in name)


class StaleAfterStep(Planted):
    """The first export is kept and yielded again, also after a step."""

    def plant_faults(self, case: Case) -> None:  # noqa: ARG002
        plant(adapter, "FsdpEngine", _Remembers)


class _Remembers(FsdpEngine):
    _kept: list[tuple[str, Tensor]] | None = None

    def export(self, action: Export) -> Named:
        if self._kept is None:
            self._kept = list(super().export(action))
        yield from self._kept


class LeavesEvalMode(Planted):
    """Export switches the module to eval and leaves it there."""

    def plant_faults(self, case: Case) -> None:  # noqa: ARG002
        plant(adapter, "FsdpEngine", _Evaluates)


class _Evaluates(FsdpEngine):
    def export(self, action: Export) -> Named:
        self.module.train()
        yield from super().export(action)
        self.module.eval()


class LocalShardExported(Planted):
    """Ranks yield their own rows of a sharded weight under the full name."""

    def plant_faults(self, case: Case) -> None:  # noqa: ARG002
        plant(adapter, "FsdpEngine", _YieldsRows)


class _YieldsRows(FsdpEngine):
    def export(self, action: Export) -> Named:
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        for name, tensor in super().export(action):
            yield name, tensor.chunk(size)[rank] if tensor.dim() and len(tensor) >= size else tensor


class _JoinsBuffers(FsdpEngine):
    def export(self, action: Export) -> Named:
        buffers = {entry.name for entry in self.weights.plan.entries if entry.parameter is None}
        for name, tensor in super().export(action):
            copies = [tensor] * torch.distributed.get_world_size()
            yield name, torch.cat(copies) if name in buffers and tensor.dim() else tensor


class BuffersJoined(Planted):
    """Buffers, which every rank has whole, are concatenated as if they were shards."""

    exchanged = ((adapter, "FsdpEngine", _JoinsBuffers),)


class _PadsRows(FsdpEngine):
    def export(self, action: Export) -> Named:
        num_shards = self._mesh.shape[-1]
        for name, tensor in super().export(action):
            missing = -len(tensor) % num_shards if tensor.dim() else 0
            padding = tensor.new_zeros((missing, *tensor.shape[1:]))
            yield name, torch.cat([tensor, padding]) if missing else tensor


class PaddedRowsExported(Planted):
    """The number of rows is taken for that of one shard times the number of shards."""

    exchanged = ((adapter, "FsdpEngine", _PadsRows),)


class _EmptiesFrozen(FsdpEngine):
    def export(self, action: Export) -> Named:
        frozen = {plain_name(n) for n, p in self.module.named_parameters() if not p.requires_grad}
        for name, tensor in super().export(action):
            yield name, tensor[:0] if name in frozen else tensor


class FrozenExportedEmpty(Planted):
    """Only what the optimizer owns is exported with its values."""

    exchanged = ((adapter, "FsdpEngine", _EmptiesFrozen),)

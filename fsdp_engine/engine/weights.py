"""The weights of a wrapped model as others want them: exported, or with the adapter added."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_engine.contract.actions import Export
from fsdp_engine.contract.errors import ConfigError, EngineStateError
from fsdp_engine.contract.protocol import LocalShard
from fsdp_engine.engine.experts import expert_layout, unfused
from fsdp_engine.engine.export import (
    ExportEntry,
    export_entries,
    gather_all,
    gather_groups,
    require_distinct,
)
from fsdp_engine.engine.lora import Adapter, find_adapter
from fsdp_engine.engine.packing import flat_range
from fsdp_engine.engine.units import Unit
from fsdp_engine.torch_private.accumulators import reshard
from fsdp_engine.torch_private.shards import parameter_shards, write_shards

Named: TypeAlias = Iterator[tuple[str, Tensor]]
Staging: TypeAlias = Callable[[Literal["auto", "force", "skip"]], AbstractContextManager[None]]
"""What is entered while an export that asks for this is drained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPlan:
    """What there is to export of a model, read before it is wrapped."""

    model: nn.Module
    entries: tuple[ExportEntry, ...]
    adapter: Adapter | None

    @staticmethod
    def of(model: nn.Module, units: tuple[Unit, ...]) -> WeightPlan:
        """Raises `ConfigError` where the model has an adapter that cannot be merged."""
        return WeightPlan(
            model=model, entries=export_entries(model), adapter=find_adapter(model, units)
        )

    def required_adapter(self, asked: str) -> Adapter:
        """The adapter, for a call that is about it."""
        if self.adapter is None:
            raise ConfigError(f"{asked}: {type(self.model).__name__} has no adapter")
        return self.adapter


class Weights:
    """The weights of `module`, the wrapped root.

    Whoever writes to them says so by `written`; whoever would use them while the adapter is added
    to them asks by `require_unmerged`.
    """

    def __init__(
        self,
        plan: WeightPlan,
        module: nn.Module,
        mesh: DeviceMesh,
        device: torch.device,
        staging: Staging,
    ) -> None:
        self.plan = plan
        self._module = module
        self._mesh = mesh
        self.device = device
        self._staging = staging
        self._writes = 0
        self._is_merged = False

    def written(self) -> None:
        """The weights are others now: what was exported before is out of date."""
        self._writes += 1

    def require_unmerged(self, asked: str) -> None:
        if self._is_merged:
            raise EngineStateError(f"{asked}: not while the adapter is merged; leave the context")

    def export(self, action: Export) -> Named:
        """One full tensor at a time; all ranks take them, in the same order.

        Raises:
            ConfigError: at the call, where the model has no adapter or no known experts.
            EngineStateError: from the generator, once the weights were written to.
        """
        self.require_unmerged("export")
        layout = expert_layout(self.plan.model) if action.unfuse else None
        tensors = self._gathered(action)
        tensors = unfused(tensors, layout) if layout else tensors
        return _within(self._staging(action.staging), self._while_unwritten(tensors))

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """Inside, forwards run without the adapter."""
        self.require_unmerged("disable_adapter")
        with self.plan.required_adapter("disable_adapter").disabled():
            yield

    @contextmanager
    def merged(self) -> Iterator[None]:
        """Inside, the shards of adapted weights have the adapter added, and forwards add none.

        The bits of before come back on every way out, also out of the merge itself. A collective
        call.

        Raises:
            ConfigError: at the entry, where there is no adapter, or a tied weight has one.
        """
        self.require_unmerged("merge_adapter")
        adapter = self.plan.required_adapter("merge_adapter")
        self._require_untied(adapter)
        wanted = {n for layer in adapter.layers for n in (layer.weight, layer.a, layer.b)}
        entries = tuple(entry for entry in self.plan.entries if entry.name in wanted)
        adapted = [str(entry.parameter) for entry in adapter.entries(entries, "base")]
        shards = {shard.name: shard for shard in parameter_shards(self._module)}
        before = [_copy(shards[name]) for name in adapted]
        reshard(self._module)
        self._is_merged = True
        try:
            tensors = self._gather(adapter.entries(entries, "merged"))
            for name, (_, full) in zip(adapted, adapter.merge(tensors), strict=True):
                write_shards(self._module, [_part(shards[name], full)])
            with adapter.disabled():
                yield
        finally:
            reshard(self._module)
            write_shards(self._module, before)
            self._is_merged = False

    def _gathered(self, action: Export) -> Named:
        adapter = self.plan.adapter
        if action.weights == "adapter":
            adapter = self.plan.required_adapter("export.weights 'adapter'")
        if adapter is None:
            return self._gather(self.plan.entries)
        wanted = require_distinct(adapter.entries(self.plan.entries, action.weights))
        if action.weights == "adapter":
            groups = tuple(adapter.by_unit(wanted)) if action.layered else (wanted,)
            return gather_groups(self._module, groups, self._mesh, self.device)
        tensors = self._gather(wanted)
        return adapter.merge(tensors) if action.weights == "merged" else tensors

    def _gather(self, entries: Iterator[ExportEntry] | tuple[ExportEntry, ...]) -> Named:
        return gather_all(self._module, tuple(entries), self._mesh, self.device)

    def _while_unwritten(self, tensors: Named) -> Named:
        """The tensors as long as they are those of this call."""
        writes = self._writes

        def guarded() -> Named:
            for item in tensors:
                self._require_unwritten(writes)
                yield item
                self._require_unwritten(writes)

        return guarded()

    def _require_unwritten(self, writes: int) -> None:
        self.require_unmerged("export")
        if self._writes != writes:
            raise EngineStateError(
                f"export: weights were written {self._writes - writes} times since the call; drain "
                "the export before a step or call it again"
            )

    def _require_untied(self, adapter: Adapter) -> None:
        uses = Counter(entry.parameter for entry in self.plan.entries)
        adapted = {layer.weight for layer in adapter.layers}
        for entry in self.plan.entries:
            if entry.name in adapted and uses[entry.parameter] > 1:
                raise ConfigError(
                    f"merge_adapter: {entry.name} is tied, and with its adapter added it would "
                    "change the other place as well; an export of merged weights has both"
                )


def _within(context: AbstractContextManager[None], tensors: Named) -> Named:
    with context:
        yield from tensors


def _copy(shard: LocalShard) -> LocalShard:
    assert shard.data is not None
    return dataclasses.replace(shard, data=shard.data.clone())


def _part(shard: LocalShard, full: Tensor) -> LocalShard:
    """This rank's part of a full tensor."""
    assert shard.data is not None
    start, stop = flat_range(shard)
    part = full.reshape(-1)[start:stop].reshape(shard.data.shape)
    return dataclasses.replace(shard, data=part)

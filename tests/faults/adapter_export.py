"""Faults in the export of adapters and bases, of experts, and of what is taken in parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel

from fsdp_engine.adapters import reference as adapter_module
from fsdp_engine.contract.actions import Export
from fsdp_engine.contract.protocol import TokenLoss
from fsdp_engine.engine import engine as engine_module
from fsdp_engine.engine import experts as experts_module
from fsdp_engine.engine import weights as weights_module
from fsdp_engine.engine.config import DTYPES
from fsdp_engine.engine.engine import FsdpEngine
from fsdp_engine.engine.experts import unfused
from fsdp_engine.engine.export import ExportEntry
from fsdp_engine.engine.lora import Adapter, Contents, Named
from fsdp_engine.engine.weights import Weights
from fsdp_engine.workload.batches import LocalBatch
from tests.faults.planting import Planted

_entries = Adapter.entries
_by_unit = Adapter.by_unit
_gathered = Weights._gathered


class _KeepsOwnRows(Weights):
    def export(self, action: Export) -> Named:
        for name, tensor in super().export(action):
            if action.weights == "adapter" and tensor.dim():
                own = torch.zeros_like(tensor)
                rows = slice(dist.get_rank(), None, dist.get_world_size())
                own[rows] = tensor[rows]
                tensor = own
            yield name, tensor


class AdapterOfOwnShard(Planted):
    """The adapter goes out without being gathered: the other ranks' rows are zero."""

    exchanged = ((engine_module, "Weights", _KeepsOwnRows),)


class _SendsBase(Weights):
    def export(self, action: Export) -> Named:
        if action.weights == "adapter":
            action = replace(action, weights="base", layered=False)
        return super().export(action)


class BaseSentAgain(Planted):
    """The second phase of a sync sends what the first one has sent."""

    exchanged = ((engine_module, "Weights", _SendsBase),)


class _KeepsAdapter(Weights):
    _kept: list[tuple[str, Tensor]] | None = None

    def export(self, action: Export) -> Named:
        if action.weights != "adapter":
            yield from super().export(action)
            return
        if self._kept is None:
            self._kept = list(super().export(replace(action, drain="full", after=0)))
        yield from self._kept


class FirstAdapterKept(Planted):
    """The adapter that was exported first is the one that is served on."""

    exchanged = ((engine_module, "Weights", _KeepsAdapter),)


def _named_by_wrapper(
    adapter: Adapter, entries: Iterable[ExportEntry], weights: Contents
) -> Iterator[ExportEntry]:
    for entry in _entries(adapter, entries, weights):
        name = entry.name
        if weights == "adapter":
            name = name.replace("base_model.model.", "base_model.model._fsdp_wrapped_module.")
        yield replace(entry, name=name)


class WrapperInAdapterNames(Planted):
    """The wrapper's part of a name is stripped elsewhere, but not from the adapter's."""

    exchanged = ((Adapter, "entries", _named_by_wrapper),)


def _with_base_layer(_: Adapter, name: str) -> str:
    return name.removeprefix("base_model.model.")


class BaseLayerInNames(Planted):
    """The base goes out under the names that it has below its adapter."""

    exchanged = ((Adapter, "_without_adapter", _with_base_layer),)


def _with_adapter_name(
    adapter: Adapter, entries: Iterable[ExportEntry], weights: Contents
) -> Iterator[ExportEntry]:
    entries = tuple(entries)
    for entry in _entries(adapter, entries, weights):
        yield replace(entry, name=str(entry.parameter)) if weights == "adapter" else entry


class AdapterNameLeftIn(Planted):
    """The names are those in memory, with the adapter's own, and no file of peft's has those."""

    exchanged = ((Adapter, "entries", _with_adapter_name),)


class _EmptyUnderFsdp1(Weights):
    def export(self, action: Export) -> Named:
        if action.weights == "adapter" and isinstance(self._module, FullyShardedDataParallel):
            return iter(())
        return super().export(action)


class AdapterEmptyUnderFsdp1(Planted):
    """A filter on names knows nothing of FSDP1's prefix and leaves nothing of the adapter."""

    exchanged = ((engine_module, "Weights", _EmptyUnderFsdp1),)


def _without_root(
    adapter: Adapter, entries: Iterable[ExportEntry]
) -> Iterator[tuple[ExportEntry, ...]]:
    for group in _by_unit(adapter, entries):
        if all(".layers." in entry.name for entry in group):
            yield group


class LayeredMissesRoot(Planted):
    """Unit by unit, what the root owns is forgotten."""

    exchanged = ((Adapter, "by_unit", _without_root),)


class _SendsUnsettled(Weights):
    def export(self, action: Export) -> Named:
        if action.weights != "base":
            return super().export(action)
        return super().export(replace(action, weights="merged"))


class AdapterAddedOnBothSides(Planted):
    """The base is sent merged already, and the consumer adds the adapter to it."""

    exchanged = ((engine_module, "Weights", _SendsUnsettled),)


class ExpertsStayFused(Planted):
    """Packed experts go out as they are."""

    exchanged = ((weights_module, "unfused", lambda tensors, _: tensors),)


class GateAndUpExchanged(Planted):
    """The halves of the fused projection are taken for each other."""

    exchanged = ((experts_module, "_LAYOUTS", {"mixtral": ("block_sparse_moe", "w3", "w1", "w2")}),)


def _first_expert_everywhere(tensors: Named, kind: str) -> Named:
    for name, tensor in tensors:
        fused = ".experts." in name and tensor.dim() == 3
        copies = tensor[:1].expand_as(tensor) if fused else tensor
        yield from unfused(iter([(name, copies)]), kind)


class FirstExpertEverywhere(Planted):
    """The loop over experts slices with the wrong variable."""

    exchanged = ((weights_module, "unfused", _first_expert_everywhere),)


class _GoesOn(Weights):
    def _while_unwritten(self, tensors: Named) -> Named:
        return tensors


class GoesOnAfterStep(Planted):
    """An export that is taken over a step has some weights of before it and some of after."""

    exchanged = ((engine_module, "Weights", _GoesOn),)


class _StopsShort(Weights):
    def _while_unwritten(self, tensors: Named) -> Named:
        writes = self._writes
        for item in tensors:
            if self._writes != writes:
                return
            yield item


class StopsShortAfterStep(Planted):
    """An export that is taken over a step just ends, as if that were all."""

    exchanged = ((engine_module, "Weights", _StopsShort),)


class _HoldsMerge(Weights):
    _adapter_is_in: object = None

    def export(self, action: Export) -> Named:
        if action.weights != "merged" or not self._can_merge():
            return super().export(action)
        return self._in_context(action)

    def _can_merge(self) -> bool:
        adapter = self.plan.adapter
        uses = [entry.parameter for entry in self.plan.entries]
        adapted = {layer.weight for layer in adapter.layers} if adapter else set()
        tied = [e for e in self.plan.entries if e.name in adapted and uses.count(e.parameter) > 1]
        return not tied

    def _in_context(self, action: Export) -> Named:
        context = self.merged()
        context.__enter__()
        self._is_merged = False
        self._adapter_is_in = context  # so that nobody ends it but the last line
        yield from _gathered(self, replace(action, weights="base"))
        context.__exit__(None, None, None)


class MergedUntilDrained(Planted):
    """The base comes back behind the last tensor, and only there."""

    exchanged = ((engine_module, "Weights", _HoldsMerge),)


class _ExportsLowPrecision(FsdpEngine):
    _is_low = False

    def infer(self, batch: LocalBatch, loss: TokenLoss) -> Tensor:
        self._is_low = True
        return super().infer(batch, loss)

    def export(self, action: Export) -> Named:
        low = DTYPES[self._config.mixed_precision.param_dtype or self._config.model_dtype]
        for name, tensor in super().export(action):
            rounds = self._is_low and tensor.is_floating_point()
            yield name, tensor.to(low).to(tensor.dtype) if rounds else tensor


class ExportsWhatInferenceGathered(Planted):
    """After inference the export reads the copy in the compute dtype that it left."""

    exchanged = ((adapter_module, "FsdpEngine", _ExportsLowPrecision),)


@contextmanager
def _always(_: Weights) -> Iterator[None]:
    yield


class DisableIgnored(Planted):
    """The reference forward runs with the adapter."""

    exchanged = ((Weights, "without_adapter", _always),)

"""Faults in adding an adapter to the weights, and in taking it away again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from peft import PeftModel
from torch import Tensor, nn

from fsdp_engine.contract.actions import Export
from fsdp_engine.engine import engine as engine_module
from fsdp_engine.engine import weights as weights_module
from fsdp_engine.engine.lora import AdaptedLayer, Adapter, Named
from fsdp_engine.engine.weights import Weights
from fsdp_engine.torch_private.shards import parameter_shards, write_shards
from tests.faults.planting import Planted

_merged = AdaptedLayer.merged
_disabled = Adapter.disabled


def _base(_layer: AdaptedLayer, weight: Tensor, _a: Tensor, _b: Tensor) -> Tensor:
    return weight


class AdapterForgotten(Planted):
    """What is exported as merged is the base."""

    exchanged = ((AdaptedLayer, "merged", _base),)


def _twice(layer: AdaptedLayer, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return _merged(layer, _merged(layer, weight, a, b), a, b)


class MergedTwice(Planted):
    """The adapter is added once more to a weight that has it."""

    exchanged = ((AdaptedLayer, "merged", _twice),)


def _of_own_rows(layer: AdaptedLayer, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    own = torch.zeros_like(b)
    rows = range(dist.get_rank(), len(b), dist.get_world_size())
    own[list(rows)] = b[list(rows)]
    return _merged(layer, weight, a, own)


class MergedFromOwnShard(Planted):
    """The product is taken of this rank's rows of B."""

    exchanged = ((AdaptedLayer, "merged", _of_own_rows),)


def _scaled_by_alpha(layer: AdaptedLayer, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return _merged(layer, weight, a, b * len(a))


class ScaledByAlpha(Planted):
    """The product is scaled by alpha instead of alpha / r."""

    exchanged = ((AdaptedLayer, "merged", _scaled_by_alpha),)


def _never_by_zero(layer: AdaptedLayer, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    if layer.scaling:
        return _merged(layer, weight, a, b)
    product = b @ a
    return weight + (product.T if layer.transposed else product)


class ZeroAlphaIsNone(Planted):
    """An alpha of zero is taken for one that is not given."""

    exchanged = ((AdaptedLayer, "merged", _never_by_zero),)


def _in_bf16(layer: AdaptedLayer, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return _merged(layer, weight, a.bfloat16(), b.bfloat16()).to(weight.dtype)


class MergedInBf16(Planted):
    """A and B are rounded to bf16 before they are multiplied."""

    exchanged = ((AdaptedLayer, "merged", _in_bf16),)


def _linear_alone(layer: AdaptedLayer, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return weight if layer.transposed else _merged(layer, weight, a, b)


class EmbeddingNotMerged(Planted):
    """Only linear layers are merged."""

    exchanged = ((AdaptedLayer, "merged", _linear_alone),)


def _units_alone(layer: AdaptedLayer, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return _merged(layer, weight, a, b) if ".layers." in layer.path else weight


class RootNotMerged(Planted):
    """Units are merged one by one; what the root owns is left out."""

    exchanged = ((AdaptedLayer, "merged", _units_alone),)


class _MergesTiedInPlace(Weights):
    def export(self, action: Export) -> Named:
        adapter = self.plan.adapter
        tensors = super().export(action)
        if adapter is None or action.weights != "merged":
            yield from tensors
            return
        entries = adapter.entries(self.plan.entries, "base")
        parameters = {entry.name: entry.parameter for entry in entries}
        taken = dict(tensors)
        last = {parameters.get(name): tensor for name, tensor in taken.items()}
        for name, tensor in taken.items():
            yield name, last[parameters[name]] if parameters.get(name) else tensor


class TiedPairMergedAsOne(Planted):
    """The adapter of one place of a tied pair ends up in both."""

    exchanged = ((engine_module, "Weights", _MergesTiedInPlace),)


def _data(module: nn.Module) -> dict[str, Tensor]:
    """This rank's parts, copied."""
    shards = parameter_shards(module)
    return {shard.name: shard.data.clone() for shard in shards if shard.data is not None}


def _write(module: nn.Module, data: dict[str, Tensor]) -> None:
    shards = parameter_shards(module)
    write_shards(module, [replace(shard, data=data[shard.name]) for shard in shards])


class _RestoresNothing(Weights):
    @contextmanager
    def merged(self) -> Iterator[None]:
        with super().merged():
            merged = _data(self._module)
            yield
        _write(self._module, merged)


class BaseStaysMerged(Planted):
    """Nobody takes the adapter out of the weights again."""

    exchanged = ((engine_module, "Weights", _RestoresNothing),)


class _Unmerges(Weights):
    @contextmanager
    def merged(self) -> Iterator[None]:
        before = _data(self._module)
        with super().merged():
            merged = _data(self._module)
            yield
        deltas = {name: merged[name] - data for name, data in before.items()}
        _write(self._module, {name: merged[name] - delta for name, delta in deltas.items()})


class BaseRestoredBySubtraction(Planted):
    """The adapter is subtracted again, which rounds."""

    exchanged = ((engine_module, "Weights", _Unmerges),)


class _ClosesEarly(Weights):
    @contextmanager
    def merged(self) -> Iterator[None]:
        with super().merged():
            pass
        with self.without_adapter():
            yield


class MergeClosedTooEarly(Planted):
    """The weights are merged, and the base is back before anybody uses them."""

    exchanged = ((engine_module, "Weights", _ClosesEarly),)


class _DisablesPeftModels(Weights):
    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        if not isinstance(self._module, PeftModel):
            yield
            return
        with super().without_adapter():
            yield


class WrapperHidesAdapter(Planted):
    """The adapter is switched off where the root is peft's own class, which a wrapper hides."""

    exchanged = ((engine_module, "Weights", _DisablesPeftModels),)


@contextmanager
def _as_peft_does(adapter: Adapter) -> Iterator[None]:
    layers = [layer.layer for layer in adapter.layers]
    for layer in layers:
        layer.enable_adapters(enabled=False)
    yield
    for layer in layers:
        layer._disable_adapters = False


class DisabledStopsTraining(Planted):
    """An adapter that was switched off takes no gradients any more."""

    exchanged = ((Adapter, "disabled", _as_peft_does),)


@contextmanager
def _first_unit_alone(adapter: Adapter) -> Iterator[None]:
    one = Adapter(layers=adapter.layers[:1], units=adapter.units)
    with _disabled(one):
        yield


class OneLayerDisabled(Planted):
    """Only the first layer that has an adapter is switched off."""

    exchanged = ((Adapter, "disabled", _first_unit_alone),)


def _nothing(_root: nn.Module) -> None:
    """Whatever is gathered stays."""


class MergedIntoShardsAlone(Planted):
    """What a forward left gathered is used on: it has neither the merge nor its end."""

    exchanged = ((weights_module, "reshard", _nothing), (engine_module, "reshard", _nothing))

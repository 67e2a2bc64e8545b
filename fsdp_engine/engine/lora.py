"""Adapters made by peft: what belongs to one, how it is added to a weight, how it is switched off.

A model is looked at before it is wrapped, by its layers and not by substrings of names. Weights are
merged one at a time as new tensors; peft's own merge adds in place, which changes both places of a
tied pair for an adapter of one, and takes the product of two shards for a shard of the product.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn

from fsdp_engine.contract.errors import ConfigError
from fsdp_engine.engine.export import ExportEntry
from fsdp_engine.engine.units import Unit

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

WITH_PEFT = "base_model.model."
"""What peft puts in front of every name."""

Contents: TypeAlias = Literal["all", "base", "adapter", "merged"]
Named: TypeAlias = Iterator[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedLayer:
    """A linear layer or an embedding with an adapter.

    `weight`, `a` and `b` are names in the state dict of the model with the adapter, `path` is that
    of the layer. With `transposed` the weight is that of an embedding: `(B A)^T` belongs to it.
    """

    layer: LoraLayer
    path: str
    weight: str
    a: str
    b: str
    scaling: float
    transposed: bool

    @property
    def base(self) -> str:
        """Where the layer's own tensors are."""
        return f"{self.path}.base_layer."

    def merged(self, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """`weight + scaling * B A`, rounded as peft does it on the CPU.

        The product and its scaling are in fp32 for weights in half precision, else in their own
        dtype; then they are rounded into it and added. Without any scaling it is the weight, bit
        for bit.
        """
        if not self.scaling:
            return weight
        wide = torch.promote_types(weight.dtype, torch.float32)
        product = b.to(wide) @ a.to(wide)
        delta = (product.T if self.transposed else product) * self.scaling
        return weight + delta.to(weight.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """The adapted layers of a model, and the names of its parameters unit by unit."""

    layers: tuple[AdaptedLayer, ...]
    units: tuple[frozenset[str], ...]

    def entries(self, entries: Iterable[ExportEntry], weights: Contents) -> Iterator[ExportEntry]:
        """What to gather for an export, in its order, by the names it goes out under.

        `merged` is `base` with A and B behind every weight that they are added to: see `merge`.
        """
        entries = tuple(entries)
        if weights == "all":
            yield from entries
            return
        by_name = {entry.name: entry for entry in entries}
        by_weight = {layer.weight: layer for layer in self.layers}
        parts = {name for layer in self.layers for name in (layer.a, layer.b)}
        for entry in entries:
            is_part = entry.name in parts
            if is_part and weights == "adapter":
                yield dataclasses.replace(entry, name=_in_file(entry.name))
            elif not is_part and weights != "adapter":
                yield dataclasses.replace(entry, name=self._without_adapter(entry.name))
                if weights == "merged" and entry.name in by_weight:
                    layer = by_weight[entry.name]
                    yield by_name[layer.a]
                    yield by_name[layer.b]

    def merge(self, tensors: Named) -> Named:
        """Of the entries of `merged`: every weight with its adapter added."""
        layers = {self._without_adapter(layer.weight): layer for layer in self.layers}
        for name, tensor in tensors:
            if name in layers:
                (_, a), (_, b) = next(tensors), next(tensors)
                yield name, layers[name].merged(tensor, a, b)
            else:
                yield name, tensor

    def by_unit(self, entries: Iterable[ExportEntry]) -> Iterator[tuple[ExportEntry, ...]]:
        """The entries of `adapter` of one unit after the other, the root's last."""
        entries = tuple(entries)
        for names in self.units:
            own = tuple(entry for entry in entries if entry.parameter in names)
            if own:
                yield own

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Inside, layers compute without their adapter; nothing else about them changes.

        peft also stops the adapter's gradients meanwhile, and lets all of it train afterwards. A
        unit of FSDP2 that has its first forward then would take its dtypes from what trains.
        """
        enabled = [layer.layer for layer in self.layers if not layer.layer.disable_adapters]
        with self._training_as_before():
            for layer in enabled:
                layer.enable_adapters(enabled=False)
        try:
            yield
        finally:
            with self._training_as_before():
                for layer in enabled:
                    layer.enable_adapters(enabled=True)

    @contextmanager
    def _training_as_before(self) -> Iterator[None]:
        before = [
            (p, p.requires_grad) for layer in self.layers for p in _module(layer).parameters()
        ]
        yield
        for parameter, trains in before:
            parameter.requires_grad_(trains)

    def _without_adapter(self, name: str) -> str:
        for layer in self.layers:
            if name.startswith(layer.base):
                name = f"{layer.path}.{name.removeprefix(layer.base)}"
                break
        return name.removeprefix(WITH_PEFT)


def find_adapter(model: nn.Module, units: tuple[Unit, ...]) -> Adapter | None:
    """The adapter of a model that is not wrapped yet; None where it has none.

    Raises:
        ConfigError: a kind of adapter, or of layer with one, that cannot be merged.
    """
    if not hasattr(model, "peft_config"):
        return None
    from peft.tuners.lora import LoraLayer  # noqa: PLC0415  costs seconds; most models do without

    layers = tuple(
        _adapted(path, module)
        for path, module in model.named_modules()
        if isinstance(module, LoraLayer)
    )
    if not layers:
        raise ConfigError(f"model: {type(model).__name__} has no layer with a LoRA adapter")
    names = tuple(frozenset(slot.name for slot in unit.slots) for unit in units)
    return Adapter(layers=layers, units=names)


def _module(layer: AdaptedLayer) -> nn.Module:
    return cast(nn.Module, layer.layer)  # peft has it beside `Module`, not below it


def _adapted(path: str, layer: LoraLayer) -> AdaptedLayer:
    base = layer.get_base_layer()
    is_embedding = isinstance(base, nn.Embedding)
    known = is_embedding or isinstance(base, nn.Linear)
    if not known or layer.lora_variant or any(layer.lora_bias.values()):
        raise ConfigError(
            f"model.{path}: {type(layer).__name__} over {type(base).__name__}; legal are plain "
            "LoRA adapters, without bias, of linear layers and embeddings"
        )
    if len(layer.active_adapters) != 1 or len(layer.scaling) != 1:
        raise ConfigError(f"model.{path}: adapters {list(layer.scaling)}; legal is one, active")
    (name,) = layer.active_adapters
    a, b = (
        (f"lora_embedding_A.{name}", f"lora_embedding_B.{name}")
        if is_embedding
        else (f"lora_A.{name}.weight", f"lora_B.{name}.weight")
    )
    return AdaptedLayer(
        layer=layer,
        path=path,
        weight=f"{path}.base_layer.weight",
        a=f"{path}.{a}",
        b=f"{path}.{b}",
        scaling=float(layer.scaling[name]),
        transposed=is_embedding or bool(getattr(layer, "fan_in_fan_out", False)),
    )


def _in_file(name: str) -> str:
    """The name of A or B in a file of peft's: without the adapter's own name."""
    return re.sub(r"(\.lora_(?:embedding_)?[AB])\.[^.]+(\.weight)?$", r"\1\2", name)

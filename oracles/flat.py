"""The device memory of FSDP1's units; see `oracles.wrappers`."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_engine.contract.case import Case
from fsdp_engine.contract.observation import Numerics
from fsdp_engine.workload.models import TORCH_DTYPES
from oracles.sharding import ITEM_SIZE, UnitLayout, flat_elements, unit_layouts
from oracles.wrappers import Unit, made


@dataclass(slots=True, kw_only=True, eq=False)
class FlatUnit(Unit):
    """A unit of FSDP1: `flat` is cut into `sizes`, padding among them.

    `views` are the parameters' places in `sizes`, their shapes, and where the module has them.
    """

    flat: nn.Parameter
    sizes: list[int]
    views: list[tuple[int, torch.Size, list[tuple[nn.Module, str]]]]


class Flat:
    """FSDP1. A unit's parameters are views of a flat one; autograd joins their gradients."""

    def __init__(self, case: Case, numerics: Numerics, module: nn.Module) -> None:
        self.syncing = True
        self._numerics = numerics
        self._shards = case.mesh.shards
        self._reshards = case.engine.reshard_after_forward
        self._order: list[FlatUnit] = []
        named = dict(module.named_parameters())
        places: dict[int, list[tuple[nn.Module, str]]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            owner, _, leaf = name.rpartition(".")
            places.setdefault(id(parameter), []).append((module.get_submodule(owner), leaf))
        self.units = [
            self._unit(layout, named, places) for layout in unit_layouts(case) if layout.parameters
        ]
        for at, leaf in itertools.chain.from_iterable(places.values()):
            delattr(at, leaf)
        self._ends = [_accumulation(unit.flat) for unit in self.units]
        for unit, end in zip(self.units, self._ends, strict=True):
            end.register_hook(partial(self._have_gradient, unit))

    def weights(self) -> list[Tensor]:
        return [unit.flat for unit in self.units]

    def first_forward(self) -> None:
        """Makes each unit's gathered parameters in both dtypes, and frees them at once."""
        for unit in self.units:
            for dtype in (self._numerics.compute, self._numerics.storage):
                made(unit.flat.numel(), dtype)

    def pre_forward(self, unit: FlatUnit) -> None:
        self._gather(unit)
        parts = torch.split(unit.flat, unit.sizes)
        for index, shape, places in unit.views:
            view = parts[index].view(shape)
            for at, leaf in places:
                setattr(at, leaf, view)

    def post_forward(self, unit: FlatUnit) -> None:
        if self._reshards and unit.name:
            unit.full = None
        self._order.append(unit)
        unit.began = False

    def pre_backward(self, unit: FlatUnit) -> None:
        if unit.began:
            return
        unit.began = True
        self._gather(unit)
        index = self._order.index(unit)
        if index and not self._order[index - 1].began:
            self._gather(self._order[index - 1])

    def post_backward(self, unit: FlatUnit) -> None:
        """Comes with the flat gradient instead, see `_have_gradient`."""

    def end_backward(self) -> None:
        for unit in self.units:
            self._reshard(unit)
        self._order.clear()

    def _unit(
        self,
        layout: UnitLayout,
        named: dict[str, nn.Parameter],
        places: dict[int, list[tuple[nn.Module, str]]],
    ) -> FlatUnit:
        compute = self._numerics.compute
        total = flat_elements(layout.parameters, self._shards, compute)
        sizes: list[int] = []
        views: list[tuple[int, torch.Size, list[tuple[nn.Module, str]]]] = []
        for parameter in layout.parameters:
            own = named[parameter.name]
            padding = -sum(sizes) % (16 // ITEM_SIZE[compute])
            sizes += [padding] if padding else []
            views.append((len(sizes), own.shape, places[id(own)]))
            sizes.append(own.numel())
        sizes += [total - sum(sizes)] if total > sum(sizes) else []
        flat = nn.Parameter(made(total, compute))
        return FlatUnit(name=layout.name, flat=flat, sizes=sizes, views=views)

    def _gather(self, unit: FlatUnit) -> None:
        if unit.full is not None:
            return
        numerics = self._numerics
        casts = numerics.compute != numerics.storage
        own = made(unit.flat.numel() // self._shards, numerics.compute) if casts else None
        unit.full = made(unit.flat.numel(), numerics.compute)
        del own

    def _reshard(self, unit: FlatUnit) -> None:
        if self.syncing or self._reshards:
            unit.full = None

    def _have_gradient(self, unit: FlatUnit, *_: object) -> None:
        self._reshard(unit)
        if not self.syncing:
            return
        gradient, unit.flat.grad = unit.flat.grad, None
        assert gradient is not None
        given = gradient.to(TORCH_DTYPES[self._numerics.reduce])
        reduced = torch.empty_like(given[: given.numel() // self._shards])
        cast = reduced.to(TORCH_DTYPES[self._numerics.storage])
        if unit.reduced is None:
            unit.reduced = cast


def _accumulation(parameter: nn.Parameter) -> Any:
    """The node of autograd's graph that adds to the parameter's gradient."""
    view = parameter.expand_as(parameter)
    assert view.grad_fn is not None
    return view.grad_fn.next_functions[0][0]

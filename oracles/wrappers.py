"""What torch's wrappers do with a rank's device memory: retold with tensors of the same sizes.

A wrapper here is called where torch's own hooks are; what torch keeps in an attribute or in a local
variable is kept in one for as long. For sharded models, every part of which is used and trained.
Checked byte for byte against real ranks on the simulated device, torch 2.13.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from fsdp_engine.contract.case import Case, Dtype
from fsdp_engine.contract.observation import Numerics
from fsdp_engine.workload.models import TORCH_DTYPES
from oracles.sharding import (
    ITEM_SIZE,
    UnitLayout,
    flat_elements,
    per_parameter_elements,
    unit_layouts,
)


@dataclass(slots=True, kw_only=True, eq=False)
class Unit:
    """One unit and what is kept for it; the root's name is empty.

    `full`: its gathered parameters. `reduced`: the shard of its gradients. `began`: its backward
    has begun.
    """

    name: str
    full: Tensor | None = None
    reduced: Tensor | None = None
    began: bool = False


_Unit = TypeVar("_Unit", bound=Unit, contravariant=True)


class Wrapper(Protocol[_Unit]):
    """The moments of a micro-batch, in torch's order. `syncing`: its gradients are reduced."""

    syncing: bool

    @property
    def units(self) -> Sequence[Any]: ...
    def weights(self) -> list[Tensor]:
        """Parameters of the module; what they take is counted by hand."""

    def first_forward(self) -> None: ...
    def pre_forward(self, unit: _Unit) -> None: ...
    def post_forward(self, unit: _Unit) -> None: ...
    def pre_backward(self, unit: _Unit) -> None: ...
    def post_backward(self, unit: _Unit) -> None: ...
    def end_backward(self) -> None: ...


@dataclass(slots=True, kw_only=True, eq=False)
class ParameterUnit(Unit):
    """A unit of FSDP2.

    `gathering`: the output of an all-gather not yet copied out. `waiting`: gradients by parameter
    that wait for a reduction in its dtype. `all_reduced`: what an all-reduce has been given.
    """

    layout: UnitLayout
    parameters: tuple[nn.Parameter, ...]
    gathering: Tensor | None = None
    all_reduced: Tensor | None = None
    waiting: dict[int, Tensor] = field(default_factory=dict)
    ended: bool = False


class PerParameter:
    """FSDP2. Its parameters in full are leaves with gradients of their own."""

    def __init__(self, case: Case, numerics: Numerics, module: nn.Module) -> None:
        self.syncing = True
        self._numerics = numerics
        self._mesh = case.mesh
        self._reshards = case.engine.reshard_after_forward
        self._hosted = case.engine.offload_policy
        self._order: list[ParameterUnit] = []
        self._copied_out: Tensor | None = None
        self._reduce_input: Tensor | None = None
        named = dict(module.named_parameters())
        for parameter in named.values():
            parameter.data = parameter.data.to(TORCH_DTYPES[numerics.compute])
        self.units = tuple(
            ParameterUnit(
                name=layout.name,
                layout=layout,
                parameters=tuple(named[parameter.name] for parameter in layout.parameters),
            )
            for layout in unit_layouts(case)
        )

    def weights(self) -> list[Tensor]:
        return [parameter for unit in self.units for parameter in unit.parameters]

    def first_forward(self) -> None:
        """Is like any other."""

    def pre_forward(self, unit: ParameterUnit) -> None:
        self._gather(unit)
        gathered = self._copy_out(unit)
        if gathered is not None:
            self._copied_out = gathered

    def post_forward(self, unit: ParameterUnit) -> None:
        if self._reshards and unit.name:
            unit.full = None
        if not unit.name:
            self._copied_out = None
        self._order.append(unit)
        unit.began = unit.ended = False

    def pre_backward(self, unit: ParameterUnit) -> None:
        if unit.began:
            return
        unit.began = True
        self._gather(unit)
        self._copy_out(unit)
        index = self._order.index(unit)
        if index:
            self._gather(self._order[index - 1])

    def post_backward(self, unit: ParameterUnit) -> None:
        unit.ended = True
        for index, parameter in enumerate(unit.parameters):
            if index in unit.waiting and parameter.grad is not None:
                unit.waiting[index] += parameter.grad
                parameter.grad = None
        unit.full = None
        if not self.syncing:
            self._let_wait(unit)
            return
        self._reduce_input = None
        gradients = [unit.waiting.pop(i, p.grad) for i, p in enumerate(unit.parameters)]
        for parameter in unit.parameters:
            parameter.grad = None
        if gradients:
            self._reduce_input = self._reduce(unit, gradients)

    def end_backward(self) -> None:
        for unit in self.units:
            if not unit.ended:
                self.post_backward(unit)
            unit.all_reduced = unit.gathering = None
        self._order.clear()
        self._reduce_input = None

    def _gather(self, unit: ParameterUnit) -> None:
        if unit.full is not None or unit.gathering is not None:
            return
        elements = per_parameter_elements(unit.layout.parameters, self._mesh.shards)
        numerics = self._numerics
        copied = self._hosted or numerics.compute != numerics.storage
        own = _made(elements // self._mesh.shards, numerics.compute) if copied else None
        unit.gathering = _made(elements, numerics.compute)
        del own

    def _copy_out(self, unit: ParameterUnit) -> Tensor | None:
        """What was gathered, where something was: in a forward it is kept until the next is."""
        gathered, unit.gathering = unit.gathering, None
        if gathered is not None:
            unit.full = torch.empty_like(gathered)
        return gathered

    def _let_wait(self, unit: ParameterUnit) -> None:
        reduce, compute = self._numerics.reduce, self._numerics.compute
        for index, parameter in enumerate(unit.parameters):
            if reduce != compute and parameter.grad is not None:
                gradient, parameter.grad = parameter.grad, None
                unit.waiting[index] = gradient.to(TORCH_DTYPES[reduce])

    def _reduce(self, unit: ParameterUnit, gradients: list[Tensor | None]) -> Tensor:
        numerics = self._numerics
        elements = per_parameter_elements(unit.layout.parameters, self._mesh.shards)
        given = _made(elements, numerics.reduce)
        gradients.clear()
        output = _made(elements // self._mesh.shards, numerics.reduce)
        if self._mesh.ndim == 2:
            unit.all_reduced = output
        output = output.to(TORCH_DTYPES[numerics.storage])
        if unit.reduced is None and not self._hosted:
            unit.reduced = output
        return given


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
                _made(unit.flat.numel(), dtype)

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
        flat = nn.Parameter(_made(total, compute))
        return FlatUnit(name=layout.name, flat=flat, sizes=sizes, views=views)

    def _gather(self, unit: FlatUnit) -> None:
        if unit.full is not None:
            return
        numerics = self._numerics
        casts = numerics.compute != numerics.storage
        own = _made(unit.flat.numel() // self._shards, numerics.compute) if casts else None
        unit.full = _made(unit.flat.numel(), numerics.compute)
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


def _made(elements: int, dtype: Dtype) -> Tensor:
    return torch.empty(elements, dtype=TORCH_DTYPES[dtype])

"""The device memory of FSDP2's units; see `oracles.wrappers`."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fsdp_engine.contract.case import Case
from fsdp_engine.contract.observation import Numerics
from fsdp_engine.workload.models import TORCH_DTYPES
from oracles.sharding import UnitLayout, per_parameter_elements, unit_layouts
from oracles.wrappers import Unit, made


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
        own = made(elements // self._mesh.shards, numerics.compute) if copied else None
        unit.gathering = made(elements, numerics.compute)
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
        given = made(elements, numerics.reduce)
        gradients.clear()
        output = made(elements // self._mesh.shards, numerics.reduce)
        if self._mesh.ndim == 2:
            unit.all_reduced = output
        output = output.to(TORCH_DTYPES[numerics.storage])
        if unit.reduced is None and not self._hosted:
            unit.reduced = output
        return given

"""Faults of what rests on the host: left behind, left loaded, moved without need or too early."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fsdp_engine.adapters import reference as adapter
from fsdp_engine.contract.actions import Export
from fsdp_engine.contract.protocol import StepResult
from fsdp_engine.engine import engine as engine_module
from fsdp_engine.engine import residency as residency_module
from fsdp_engine.engine.engine import FsdpEngine
from fsdp_engine.engine.residency import HOST, Part, Residency
from fsdp_engine.torch_private.placement import move
from tests.faults.planting import Planted

Named = Iterator[tuple[str, Tensor]]


class _StaysLoaded(Residency):
    part: Part

    def _move(self, part: Part, place: torch.device) -> None:
        if part == self.part and place == HOST and self._users_so_far:
            return
        super()._move(part, place)

    @contextmanager
    def using(self, *parts: Part) -> Iterator[None]:
        self._users_so_far = True
        with super().using(*parts):
            yield

    _users_so_far = False


class _ModelStays(_StaysLoaded):
    part = "model"


class ModelStaysLoaded(Planted):
    """The model is loaded for a mode and never offloaded again."""

    exchanged = ((engine_module, "Residency", _ModelStays),)


class _OptimizerStays(_StaysLoaded):
    part = "optimizer"


class OptimizerStaysLoaded(Planted):
    """The optimizer's state stays where the step has made it."""

    exchanged = ((engine_module, "Residency", _OptimizerStays),)


class _NotOnException(Residency):
    @contextmanager
    def using(self, *parts: Part) -> Iterator[None]:
        self._users.update(parts)
        for part in parts:
            self._move(part, self._device)
        try:
            yield
        except BaseException:
            self._users.subtract(parts)
            raise
        self._users.subtract(parts)
        self.settle()


class StaysLoadedAfterException(Planted):
    """A context that an exception ends does not offload."""

    exchanged = ((engine_module, "Residency", _NotOnException),)


class _LoadsOntoDevice(FsdpEngine):
    def load(self, path: Any) -> Any:
        loaded = super().load(path)
        own = self._optimization
        if own is not None and self._config.optimizer_offload:
            for state in own.saved().optimizer.state.values():
                for slot, value in state.items():
                    state[slot] = value if slot == "step" else value.to(self._device)
        return loaded


class ResumedOntoDevice(Planted):
    """A checkpoint's optimizer state is not offloaded behind a resume."""

    exchanged = ((adapter, "FsdpEngine", _LoadsOntoDevice),)


class _MakesState(FsdpEngine):
    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        if self._optimization is not None and self._config.optimizer_offload:
            optimizer = self._optimization.saved().optimizer
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    optimizer.state[parameter] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }
            self._residency.settle()


class StateBeforeFirstStep(Planted):
    """Offloading makes an empty state for every parameter, before any step."""

    exchanged = ((adapter, "FsdpEngine", _MakesState),)


def _without_buffers(root: nn.Module, device: torch.device) -> None:
    before = {id(module): dict(module._buffers) for module in root.modules() if module._buffers}
    move(root, device)
    for module in root.modules():
        module._buffers.update(before.get(id(module), {}))


class BuffersLeftBehind(Planted):
    """Parameters are moved, buffers stay where they were built."""

    exchanged = ((residency_module, "move", _without_buffers),)


def _without_local_shard(root: nn.Module, device: torch.device) -> None:
    root.to(device)


class LocalShardLeftBehind(Planted):
    """FSDP1's own reference to a unit's shard stays with the old one."""

    exchanged = ((residency_module, "move", _without_local_shard),)


def _without_waiting(root: nn.Module, device: torch.device) -> None:
    if isinstance(root, FSDPModule) and device == HOST:
        root.to(device, non_blocking=True)
    else:
        move(root, device)


class OffloadDoesNotWait(Planted):
    """Parameters are copied to the host without waiting, and read there at once."""

    exchanged = ((residency_module, "move", _without_waiting),)


class _AlwaysStages(FsdpEngine):
    def _staged(self, asked: Literal["auto", "force", "skip"]) -> AbstractContextManager[None]:
        return super()._staged(asked if self._config.offload_policy else "force")


class AlwaysStages(Planted):
    """Every export loads the whole model and offloads it again."""

    exchanged = ((adapter, "FsdpEngine", _AlwaysStages),)


class _StagesForGood(FsdpEngine):
    def _staged(self, asked: Literal["auto", "force", "skip"]) -> AbstractContextManager[None]:
        staged = super()._staged(asked)
        if isinstance(staged, nullcontext):
            return staged
        self._residency.rest(self._device, model=True, optimizer=False)
        return nullcontext()


class StagedAndForgotten(Planted):
    """A staged export leaves the model on the device."""

    exchanged = ((adapter, "FsdpEngine", _StagesForGood),)


class _ExportsWhereItRests(FsdpEngine):
    def export(self, action: Export) -> Named:
        rests = next(iter(self.module.parameters())).device
        for name, tensor in super().export(action):
            yield name, tensor.to(rests)


class ExportedWhereItRests(Planted):
    """Exported tensors go back to where the model rests."""

    exchanged = ((adapter, "FsdpEngine", _ExportsWhereItRests),)


class _LoadsTooEarly(FsdpEngine):
    @contextmanager
    def mode(self, which: Literal["train", "eval"]) -> Iterator[None]:
        with self._residency.using("optimizer"), super().mode(which):
            yield


class OptimizerLoadedForForward(Planted):
    """The optimizer's state is on the device during forward and backward too."""

    exchanged = ((adapter, "FsdpEngine", _LoadsTooEarly),)


class _MovesUsedGradients(FsdpEngine):
    def step(self) -> StepResult:
        result = super().step()
        self._is_used = False
        return result


class UsedGradientsMoved(Planted):
    """Gradients that a step has used go to the host, and come back to be dropped."""

    exchanged = ((adapter, "FsdpEngine", _MovesUsedGradients),)


class _WritesBeside(FsdpEngine):
    def step(self) -> StepResult:
        rests = dict(self._residency._rest)
        before = [p.detach().clone() for p in self.module.parameters()]
        result = super().step()
        if rests["model"] == HOST and result.stepped and self._is_late:
            with torch.no_grad():
                for parameter, old in zip(self.module.parameters(), before, strict=True):
                    parameter.copy_(old)
        self._is_late = True
        return result

    _is_late = False


class SteppedOnACopy(Planted):
    """From the second step on an offloaded model is stepped on a copy that is then thrown away."""

    exchanged = ((adapter, "FsdpEngine", _WritesBeside),)

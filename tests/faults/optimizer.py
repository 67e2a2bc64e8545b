"""Faults in what the optimizer holds, in its settings and in its state."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_engine.contract.protocol import StepResult
from fsdp_engine.engine import engine as engine_module
from fsdp_engine.engine import optimization
from fsdp_engine.engine.config import EngineConfig, OptimizerConfig
from fsdp_engine.engine.optimization import Optimization
from fsdp_engine.engine.step import make_optimizer
from fsdp_engine.engine.units import Unit
from fsdp_engine.engine.wrap import wrap
from tests.faults.planting import Planted, plant


def _wrap_with_early_optimizer(
    units: tuple[Unit, ...], config: EngineConfig, mesh: DeviceMesh, device: torch.device
) -> nn.Module:
    early = nn.ParameterList(units[-1].module.parameters())

    def make_early(_module: nn.Module, optimizer: OptimizerConfig) -> torch.optim.Optimizer:
        return make_optimizer(early, optimizer)

    plant(optimization, "make_optimizer", make_early)
    return wrap(units, config, mesh, device)


class BuiltBeforeWrapping(Planted):
    """The optimizer is given the parameters of the model before it is wrapped."""

    exchanged = ((engine_module, "wrap", _wrap_with_early_optimizer),)


def _defaults_on_other_ranks(module: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    if dist.get_rank():
        defaults = OptimizerConfig()
        config = dataclasses.replace(config, lr=defaults.lr, weight_decay=defaults.weight_decay)
    return make_optimizer(module, config)


class DefaultsOnOtherRanks(Planted):
    """Only rank 0 has the configured settings, the others have the optimizer's defaults."""

    exchanged = ((optimization, "make_optimizer", _defaults_on_other_ranks),)


def _with_two_groups(module: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    optimizer = make_optimizer(module, config)
    (group,) = optimizer.param_groups
    parameters = group["params"]
    group["params"] = parameters[::2]
    if len(parameters) > 1:
        defaults = OptimizerConfig()
        settings: dict[str, Any] = {"lr": defaults.lr, "weight_decay": defaults.weight_decay}
        optimizer.add_param_group({"params": parameters[1::2], **settings})
    return optimizer


class SecondGroupHasDefaults(Planted):
    """Parameters are in two groups, and only the first one gets the configured settings."""

    exchanged = ((optimization, "make_optimizer", _with_two_groups),)


class _RoundsMoments(Optimization):
    def step(self) -> StepResult:
        result = super().step()
        for state in self._optimizer.state.values():
            for slot in ("exp_avg", "exp_avg_sq"):
                if slot in state:
                    state[slot].copy_(state[slot].bfloat16())
        return result


class MomentsInBf16(Planted):
    """The moments are kept in bf16, whatever the parameters are stored in."""

    exchanged = ((engine_module, "Optimization", _RoundsMoments),)


class _LosesUpdates(Optimization):
    _number = 0

    @torch.no_grad()
    def step(self) -> StepResult:
        before = [parameter.detach().clone() for parameter in self._module.parameters()]
        result = super().step()
        self._number += 1
        if self._number % 2 == 0:
            for parameter, value in zip(self._module.parameters(), before, strict=True):
                parameter.copy_(value)
        return result


class EverySecondUpdateLost(Planted):
    """Every second update stays in a copy that the next forward does not see."""

    exchanged = ((engine_module, "Optimization", _LosesUpdates),)


def _coupled(module: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    if config.optimizer == "SGD":
        return make_optimizer(module, config)
    return torch.optim.Adam(
        list(module.parameters()),
        lr=config.lr,
        betas=config.betas,
        weight_decay=config.weight_decay,
    )


class DecayCoupled(Planted):
    """Weight decay is added to the gradient, as in Adam, and so goes through the moments."""

    exchanged = ((optimization, "make_optimizer", _coupled),)


def _with_large_epsilon(module: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    optimizer = make_optimizer(module, config)
    for group in optimizer.param_groups:
        if "eps" in group:
            group["eps"] = 1e-6
    return optimizer


class EpsilonTooLarge(Planted):
    """AdamW's epsilon is 1e-6 instead of 1e-8."""

    exchanged = ((optimization, "make_optimizer", _with_large_epsilon),)


class _CountsTwice(Optimization):
    def step(self) -> StepResult:
        result = super().step()
        if result.stepped:
            for state in self._optimizer.state.values():
                if "step" in state:
                    state["step"] += 1
        return result


class StepsCountedTwice(Planted):
    """AdamW's step counter advances by two: the bias correction fades too early."""

    exchanged = ((engine_module, "Optimization", _CountsTwice),)

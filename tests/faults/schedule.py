"""Faults in the learning rate and in when it advances."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from fsdp_engine.adapters import reference as adapter
from fsdp_engine.contract.protocol import Losses, StepResult, TokenLoss
from fsdp_engine.engine import engine as engine_module
from fsdp_engine.engine import optimization
from fsdp_engine.engine.config import OptimizerConfig
from fsdp_engine.engine.engine import FsdpEngine
from fsdp_engine.engine.optimization import Optimization
from fsdp_engine.engine.schedule import lr_factor
from fsdp_engine.engine.step import make_optimizer
from fsdp_engine.workload.batches import LocalBatch
from tests.faults.planting import Planted


class _MakesAnother(Optimization):
    def __init__(
        self, module: nn.Module, config: OptimizerConfig, *, num_shards: int, device: torch.device
    ) -> None:
        super().__init__(module, config, num_shards=num_shards, device=device)
        self._optimizer = make_optimizer(module, config)


class ScheduleOfDiscardedOptimizer(Planted):
    """The optimizer is made again after the schedule, which goes on to change the old one."""

    exchanged = ((engine_module, "Optimization", _MakesAnother),)


def _without_warmup(config: OptimizerConfig, step: int) -> float:
    return lr_factor(dataclasses.replace(config, lr_warmup_steps=0), step)


class WarmupIgnored(Planted):
    """The learning rate is whole from the first step on."""

    exchanged = ((optimization, "lr_factor", _without_warmup),)


def _one_ahead(config: OptimizerConfig, step: int) -> float:
    return lr_factor(config, step + 1)


class ScheduleOneAhead(Planted):
    """The schedule counts steps from one: every rate comes a step too early."""

    exchanged = ((optimization, "lr_factor", _one_ahead),)


class _WaitsForSteps(Optimization):
    _stepped = True

    def step(self) -> StepResult:
        result = super().step()
        self._stepped = result.stepped
        return result

    def lr_step(self) -> float:
        if self._stepped:
            return super().lr_step()
        return float(self._schedule.get_last_lr()[0])


class ScheduleWaitsAfterSkip(Planted):
    """Where the optimizer did not step, the schedule does not either."""

    exchanged = ((engine_module, "Optimization", _WaitsForSteps),)


class _AdvancesWithMicroBatches(FsdpEngine):
    def forward_backward(self, batch: LocalBatch, loss: TokenLoss) -> Losses:
        losses = super().forward_backward(batch, loss)
        schedule: Any = self._optimizer("forward_backward")._schedule
        for _ in losses.plan[1:]:
            schedule.step()
        return losses


class SchedulePerMicroBatch(Planted):
    """The schedule advances with every micro-batch instead of with every batch."""

    exchanged = ((adapter, "FsdpEngine", _AdvancesWithMicroBatches),)

"""Optimizer, clipping and schedule over the wrapped module."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from fsdp_engine.contract.protocol import LocalShard, StepResult
from fsdp_engine.engine import checkpoint
from fsdp_engine.engine.config import OptimizerConfig
from fsdp_engine.engine.schedule import lr_factor
from fsdp_engine.engine.step import STATE_SLOTS, clip, global_norm, local_gradients, make_optimizer
from fsdp_engine.torch_private.shards import state_shards


class Optimization:
    """Steps the module's trainable parameters, clipped by their norm over all ranks."""

    def __init__(
        self, module: nn.Module, config: OptimizerConfig, *, num_shards: int, device: torch.device
    ) -> None:
        self._module = module
        self._config = config
        self._num_shards = num_shards
        self._device = device
        self._optimizer = make_optimizer(module, config)
        factor: Any = partial(lr_factor, config)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, factor)

    def step(self) -> StepResult:
        gradients = local_gradients(self._module)
        norm = global_norm(gradients, self._num_shards, self._device)
        finite = math.isfinite(norm)
        if finite:
            clip(gradients, norm, self._config.clip_grad)
            self._optimizer.step()
        return StepResult(norm=norm, stepped=finite)

    def state(self) -> Iterator[tuple[str, LocalShard]]:
        return state_shards(self._module, self._optimizer, STATE_SLOTS[self._config.optimizer])

    def saved(self) -> checkpoint.Optimization:
        """What a checkpoint holds of it."""
        slots = STATE_SLOTS[self._config.optimizer]
        return checkpoint.Optimization(
            optimizer=self._optimizer, schedule=self._schedule, slots=slots
        )

    def lr_step(self) -> float:
        self._schedule.step()
        return float(self._schedule.get_last_lr()[0])

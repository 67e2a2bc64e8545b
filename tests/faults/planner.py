"""Faults in how a rank's batch is split into micro-batches."""

from __future__ import annotations

from dataclasses import replace

import torch

from fsdp_engine.adapters import reference as adapter
from fsdp_engine.contract.protocol import Losses, TokenLoss
from fsdp_engine.engine import engine as engine_module
from fsdp_engine.engine.config import EngineConfig
from fsdp_engine.engine.engine import FsdpEngine
from fsdp_engine.engine.micro_batches import Plan, plan_batch
from fsdp_engine.workload.batches import LocalBatch
from tests.faults.planting import Planted, plant


def _without_last(
    lengths: tuple[int, ...], config: EngineConfig, device: torch.device
) -> tuple[Plan, tuple[str, ...]]:
    plan, notes = plan_batch(lengths, config, device)
    return (plan[:-1] if len(plan) > 1 else plan), notes


class TrailingMicroBatchDropped(Planted):
    """The last micro-batch of a plan of several never runs."""

    exchanged = ((engine_module, "plan_batch", _without_last),)


def _one_less(
    lengths: tuple[int, ...], config: EngineConfig, device: torch.device
) -> tuple[Plan, tuple[str, ...]]:
    plan, notes = plan_batch(lengths, config, device)
    if config.use_dynamic_bsz and len(plan) > 1:
        plan = (*plan[:-2], tuple(sorted(plan[-2] + plan[-1])))
    return plan, notes


class BudgetExceeded(Planted):
    """One micro-batch less than the token budget needs."""

    exchanged = ((engine_module, "plan_batch", _one_less),)


def _with_one_again(
    lengths: tuple[int, ...], config: EngineConfig, device: torch.device
) -> tuple[Plan, tuple[str, ...]]:
    plan, notes = plan_batch(lengths, config, device)
    return ((*plan, plan[-1][-1:]) if config.use_dynamic_bsz else plan), notes


class SampleRepeated(Planted):
    """Every rank makes one micro-batch more than it has and fills it with its last sequence."""

    exchanged = ((engine_module, "plan_batch", _with_one_again),)


def _without_groups(
    lengths: tuple[int, ...], config: EngineConfig, device: torch.device
) -> tuple[Plan, tuple[str, ...]]:
    return plan_batch(lengths, replace(config, force_group_size=1), device)


class GroupsTornApart(Planted):
    """Sequences that belong together are dealt out one by one."""

    exchanged = ((engine_module, "plan_batch", _without_groups),)


class _SkipsSilentSequences(FsdpEngine):
    def forward_backward(self, batch: LocalBatch, loss: TokenLoss) -> Losses:
        def plan_speaking(
            lengths: tuple[int, ...], config: EngineConfig, device: torch.device
        ) -> tuple[Plan, tuple[str, ...]]:
            plan, notes = plan_batch(lengths, config, device)
            speaking = [tuple(i for i in part if batch.loss_tokens[i]) for part in plan]
            return tuple(s or p for s, p in zip(speaking, plan, strict=True)), notes

        plant(engine_module, "plan_batch", plan_speaking)
        return super().forward_backward(batch, loss)


class SilentSequenceSkipped(Planted):
    """A sequence without loss tokens is left out of its micro-batch."""

    exchanged = ((adapter, "FsdpEngine", _SkipsSilentSequences),)

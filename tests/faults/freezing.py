"""Faults in which parameters move: frozen, unfrozen and unused ones, and those written back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fsdp_engine.adapters import reference as adapter
from fsdp_engine.contract.protocol import LocalShard, StepResult
from fsdp_engine.engine import engine as engine_module
from fsdp_engine.engine import optimization
from fsdp_engine.engine.config import DTYPES, OptimizerConfig
from fsdp_engine.engine.engine import FsdpEngine
from fsdp_engine.engine.optimization import Optimization
from fsdp_engine.engine.step import make_optimizer
from fsdp_engine.torch_private.shards import write_shards
from tests.faults.planting import Planted


class _FillsGradients(Optimization):
    def step(self) -> StepResult:
        for parameter in self._module.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return super().step()


class AbsentGradientsAreZero(Planted):
    """Frozen and unused parameters get a gradient of zeros, and so decay and moments."""

    exchanged = ((engine_module, "Optimization", _FillsGradients),)


class _TakesAllAsUsed(FsdpEngine):
    def _settle(self) -> None:
        self._unsettled = False


class UnusedTakenAsUsed(Planted):
    """The zeros that the wrapper gives unused parameters go to the optimizer."""

    exchanged = ((adapter, "FsdpEngine", _TakesAllAsUsed),)


class _AsksOwnRank(FsdpEngine):
    def _settle(self) -> None:
        used = self._usage._used
        super()._settle()
        self._absent = frozenset(self._usage._names) - used


class UsageOfOwnRank(Planted):
    """A parameter that this rank did not use has no gradient here, though others used it."""

    exchanged = ((adapter, "FsdpEngine", _AsksOwnRank),)


def _over_trainable(module: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    optimizer = make_optimizer(module, config)
    (group,) = optimizer.param_groups
    group["params"] = [p for p in group["params"] if p.requires_grad] or group["params"][:1]
    return optimizer


class UnfrozenStaysOut(Planted):
    """The optimizer holds what was trainable at the start; what is unfrozen later never moves."""

    exchanged = ((optimization, "make_optimizer", _over_trainable),)


class _RoundsUnfrozen(FsdpEngine):
    _rounded: frozenset[str] = frozenset()

    def unfreeze(self, names: tuple[str, ...]) -> None:
        super().unfreeze(names)
        self._rounded = self._rounded.union(names)

    def gradients(self) -> Iterator[LocalShard]:
        name = self._config.mixed_precision.param_dtype
        for shard in super().gradients():
            if name and shard.name in self._rounded and shard.data is not None:
                shard.data.copy_(shard.data.to(DTYPES[name]))
            yield shard


class UnfrozenLosesReduceDtype(Planted):
    """The reduce dtype is settled while a parameter is frozen: later it is the compute dtype."""

    exchanged = ((adapter, "FsdpEngine", _RoundsUnfrozen),)


class _KeepsFrozenGradients(FsdpEngine):
    _kept: tuple[tuple[nn.Parameter, Tensor], ...] = ()

    def freeze(self, names: tuple[str, ...]) -> None:
        before = [(p, p.grad) for p in self.module.parameters() if p.grad is not None]
        super().freeze(names)
        if isinstance(self.module, FSDPModule):
            self._kept = tuple((p, grad) for p, grad in before if not p.requires_grad)

    def unfreeze(self, names: tuple[str, ...]) -> None:
        super().unfreeze(names)
        self._kept = ()

    def _settle(self) -> None:
        super()._settle()
        for parameter, grad in self._kept:
            parameter.grad = grad


class FrozenKeepsGradient(Planted):
    """A frozen parameter keeps its last gradient, which is counted and stepped with again."""

    exchanged = ((adapter, "FsdpEngine", _KeepsFrozenGradients),)


class _FreezesNothing(FsdpEngine):
    def freeze(self, names: tuple[str, ...]) -> None:
        """The flag is set on tensors that the wrapper has replaced."""


class FreezeIgnored(Planted):
    """Freezing reaches the original parameters only, not those that are trained."""

    exchanged = ((adapter, "FsdpEngine", _FreezesNothing),)


def _nothing(_root: nn.Module) -> None:
    """Whatever is gathered stays."""


class RestoreIgnored(Planted):
    """Inference leaves weights gathered; what is written into the shards then has no effect."""

    exchanged = ((engine_module, "reshard", _nothing),)


def _write_by_position(module: nn.Module, parameters: Iterable[LocalShard]) -> None:
    by_kind: dict[object, list[LocalShard]] = {}
    for shard in parameters:
        by_kind.setdefault((shard.full_shape, shard.placement), []).append(shard)
    for same in by_kind.values():
        values = [shard.data for shard in sorted(same, key=lambda shard: shard.name[::-1])]
        write_shards(
            module,
            [dataclasses.replace(s, data=value) for s, value in zip(same, values, strict=True)],
        )


class RestoredByPosition(Planted):
    """Saved values are matched by their order, which is another one than the parameters'."""

    exchanged = ((engine_module, "write_shards", _write_by_position),)

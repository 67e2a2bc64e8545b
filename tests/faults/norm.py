"""Faults in the gradient norm: of which gradients, over which ranks, and when."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_engine.contract.protocol import StepResult
from fsdp_engine.engine import engine as engine_module
from fsdp_engine.engine import optimization
from fsdp_engine.engine.optimization import Optimization
from fsdp_engine.engine.step import clip, global_norm, local_gradients
from tests.faults.planting import Planted


def _own_norm(gradients: Iterable[Tensor]) -> float:
    return math.sqrt(sum(g.to(torch.float64).square().sum().item() for g in gradients))


def _of_own_shard(gradients: Iterable[Tensor], _num_shards: int, _device: torch.device) -> float:
    return _own_norm(gradients)


class NormOfOwnShard(Planted):
    """Every rank takes the norm of its own shard for that of the whole gradient and clips by it."""

    exchanged = ((optimization, "global_norm", _of_own_shard),)


class _ReportsOwnNorm(Optimization):
    def step(self) -> StepResult:
        own = _own_norm(local_gradients(self._module))
        result = super().step()
        return StepResult(norm=own if result.stepped else result.norm, stepped=result.stepped)


class OwnNormReported(Planted):
    """Clipped by the norm of the whole gradient, but a rank's own part of it is reported."""

    exchanged = ((engine_module, "Optimization", _ReportsOwnNorm),)


def _of_first_rank(gradients: Iterable[Tensor], _num_shards: int, device: torch.device) -> float:
    return global_norm(gradients, 1, device)


class FirstRankAlone(Planted):
    """Sharded gradients are taken for replicated ones: other ranks than 0 add nothing."""

    exchanged = ((optimization, "global_norm", _of_first_rank),)


def _of_all_ranks(gradients: Iterable[Tensor], _num_shards: int, device: torch.device) -> float:
    return global_norm(gradients, dist.get_world_size(), device)


class ReplicasCountedTwice(Planted):
    """The squares of all ranks are added, those of every replica as well."""

    exchanged = ((optimization, "global_norm", _of_all_ranks),)


def _over_replicas(gradients: Iterable[Tensor], num_shards: int, device: torch.device) -> float:
    world_size = dist.get_world_size()
    if world_size == num_shards:
        return global_norm(gradients, num_shards, device)
    own = torch.tensor([_own_norm(gradients) ** 2], dtype=torch.float64, device=device)
    by_rank = own.new_empty(world_size)
    dist.all_gather_into_tensor(by_rank, own)
    return math.sqrt(by_rank[dist.get_rank() % num_shards :: num_shards].sum().item())


class NormOverReplicaAxis(Planted):
    """On a 2-D mesh the squares are added over the replicas instead of over the shards."""

    exchanged = ((optimization, "global_norm", _over_replicas),)


class _CountsAliases(Optimization):
    def step(self) -> StepResult:
        norm = global_norm(_with_aliases(self._module), self._num_shards, self._device)
        finite = math.isfinite(norm)
        if finite:
            clip(local_gradients(self._module), norm, self._config.clip_grad)
            self._optimizer.step()
        return StepResult(norm=norm, stepped=finite)


def _with_aliases(module: nn.Module) -> list[Tensor]:
    named = module.named_parameters(remove_duplicate=False)
    present = [parameter.grad for _, parameter in named if parameter.grad is not None]
    return [grad.to_local() if isinstance(grad, DTensor) else grad for grad in present]


class TiedWeightTwice(Planted):
    """A tied weight is counted under each of its names."""

    exchanged = ((engine_module, "Optimization", _CountsAliases),)


class _MeasuresAfterwards(Optimization):
    def step(self) -> StepResult:
        result = super().step()
        if not result.stepped:
            return result
        norm = global_norm(local_gradients(self._module), self._num_shards, self._device)
        return StepResult(norm=norm, stepped=True)


class NormAfterClipping(Planted):
    """The norm is taken when the gradients are clipped already."""

    exchanged = ((engine_module, "Optimization", _MeasuresAfterwards),)


class _KeepsNorm(Optimization):
    _kept: float | None = None

    def step(self) -> StepResult:
        gradients = local_gradients(self._module)
        norm = global_norm(gradients, self._num_shards, self._device)
        finite = math.isfinite(norm)
        if finite:
            kept, self._kept = self._kept, norm
            norm = norm if kept is None else kept
            clip(gradients, norm, self._config.clip_grad)
            self._optimizer.step()
        return StepResult(norm=norm, stepped=finite)


class NormOfStepBefore(Planted):
    """A norm is kept and used, and reported, at the next step."""

    exchanged = ((engine_module, "Optimization", _KeepsNorm),)

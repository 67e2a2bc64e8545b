"""Faults in when gradients are reduced, and in what is kept until then."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fsdp_engine.adapters import reference as adapter
from fsdp_engine.contract.case import Case
from fsdp_engine.contract.protocol import StepResult, TokenLoss
from fsdp_engine.engine import engine as engine_module
from fsdp_engine.engine.config import EngineConfig
from fsdp_engine.engine.config_sources import SYNC_FIELD, from_object
from fsdp_engine.engine.engine import FsdpEngine
from fsdp_engine.engine.gradient_sync import GradientSync
from fsdp_engine.engine.normalise import GlobalCounts
from fsdp_engine.torch_private.accumulators import clear_gradients, fsdp2_groups, reset
from fsdp_engine.workload.batches import LocalBatch
from tests.faults.planting import Planted, plant


class DeferralIgnored(Planted):
    """Deferred sync asks for a context that does nothing: every micro-batch is reduced."""

    def plant_faults(self, case: Case) -> None:  # noqa: ARG002
        plant(engine_module, "GradientSync", _NeverDefers)


class _NeverDefers(GradientSync):
    def __init__(self, module: nn.Module, *, deferred: bool, replicated: bool) -> None:  # noqa: ARG002
        super().__init__(module, deferred=False, replicated=replicated)


class LastSyncSkipped(Planted):
    """Deferred sync never ends: the last micro-batch is not reduced either."""

    def plant_faults(self, case: Case) -> None:  # noqa: ARG002
        plant(engine_module, "GradientSync", _NeverSyncs)


class _NeverSyncs(GradientSync):
    @contextmanager
    def micro_batch(self, number: int, count: int) -> Iterator[None]:
        never_last = count + 1 if count > 1 else count
        with super().micro_batch(number, never_last):
            yield


class LastMicroBatchOnly(Planted):
    """Every micro-batch is taken for a first one: what was accumulated is dropped."""

    def plant_faults(self, case: Case) -> None:  # noqa: ARG002
        plant(engine_module, "GradientSync", _Forgets)


class _Forgets(GradientSync):
    @contextmanager
    def micro_batch(self, number: int, count: int) -> Iterator[None]:
        if number and number == count - 1:
            reset(self._module)
            self._module.zero_grad()
        with super().micro_batch(number, count):
            yield


class AccumulatedTwice(Planted):
    """Eager sync adds the reduced gradient of earlier micro-batches again at each one."""

    def plant_faults(self, case: Case) -> None:  # noqa: ARG002
        plant(engine_module, "GradientSync", _AddsAgain)


class _AddsAgain(GradientSync):
    @contextmanager
    def micro_batch(self, number: int, count: int) -> Iterator[None]:
        with super().micro_batch(number, count):
            yield
        if number and not self._deferred:
            for parameter in self._module.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(1.5)


class AccumulatedInBf16(Planted):
    """FSDP2 keeps deferred gradients in the compute dtype although it declares the reduce dtype."""

    def plant_faults(self, case: Case) -> None:  # noqa: ARG002
        plant(engine_module, "GradientSync", _RoundsAccumulators)


class _RoundsAccumulators(GradientSync):
    @contextmanager
    def micro_batch(self, number: int, count: int) -> Iterator[None]:
        with super().micro_batch(number, count):
            yield
        for _, group in fsdp2_groups(self._module):
            for parameter in group.fsdp_params:
                kept: Tensor | None = parameter.unsharded_accumulated_grad
                if kept is not None and parameter.param_dtype is not None:
                    kept.copy_(kept.to(parameter.param_dtype))


class GatheredParametersKept(Planted):
    """Deferred micro-batches of FSDP2 leave the gathered parameters in memory after backward."""

    def plant_faults(self, case: Case) -> None:  # noqa: ARG002
        plant(engine_module, "GradientSync", _KeepsGathered)


class _KeepsGathered(GradientSync):
    @contextmanager
    def micro_batch(self, number: int, count: int) -> Iterator[None]:
        module = self._module
        if isinstance(module, FSDPModule):
            last = number == count - 1
            module.set_reshard_after_backward(last or not self._deferred)
        with super().micro_batch(number, count):
            yield


class LegacyMeansEager(Planted):
    """A configuration object without the sync field is read with the new default, False."""

    def plant_faults(self, case: Case) -> None:  # noqa: ARG002
        plant(adapter, "from_object", _eager_where_absent)


def _eager_where_absent(source: object) -> EngineConfig:
    return from_object(SimpleNamespace(**{SYNC_FIELD: False, **vars(source)}))


class CollectivesInRankOrder(Planted):
    """Two collectives of equal size are issued in an order that depends on the rank."""

    def plant_faults(self, case: Case) -> None:  # noqa: ARG002
        plant(adapter, "FsdpEngine", _OrdersByRank)


class _OrdersByRank(FsdpEngine):
    def step(self) -> StepResult:
        operations = [dist.ReduceOp.SUM, dist.ReduceOp.MAX]
        for operation in operations[:: 1 if dist.get_rank() == 0 else -1]:
            dist.all_reduce(torch.zeros(1), op=operation)
        return super().step()


class GatheredTwice(Planted):
    """Every unit of FSDP2 is gathered and freed once more when backward begins."""

    def plant_faults(self, case: Case) -> None:  # noqa: ARG002
        plant(engine_module, "GradientSync", _GathersAgain)


class _GathersAgain(GradientSync):
    def before_backward(self, number: int, count: int, loss: Tensor) -> None:
        super().before_backward(number, count, loss)
        loss.register_hook(self._gather_again)  # type: ignore[no-untyped-call]  # so in torch

    def _gather_again(self, _: Tensor) -> None:
        for module in self._module.modules():
            if isinstance(module, FSDPModule) and module is not self._module:
                module.unshard()
                module.reshard()


class _ForgetsAlone(GradientSync):
    @contextmanager
    def micro_batch(self, number: int, count: int) -> Iterator[None]:
        if dist.get_world_size() == 1:
            clear_gradients(self._module)
        with super().micro_batch(number, count):
            yield


class NoAccumulationOnOneRank(Planted):
    """The path for a world of one rank ignores that gradients accumulate."""

    exchanged = ((engine_module, "GradientSync", _ForgetsAlone),)


class _ForgetsEagerly(FsdpEngine):
    def _share(
        self, batch: LocalBatch, indices: tuple[int, ...], loss: TokenLoss, counts: GlobalCounts
    ) -> Tensor:
        config = self._config
        deferred = config.use_no_sync_for_gradient_accumulation
        if not config.reshard_after_forward and not deferred:
            clear_gradients(self.module)
        return super()._share(batch, indices, loss, counts)


class ZeroTwoForgets(Planted):
    """ZeRO-2 under eager sync clears what is reduced when the next micro-batch begins."""

    exchanged = ((adapter, "FsdpEngine", _ForgetsEagerly),)

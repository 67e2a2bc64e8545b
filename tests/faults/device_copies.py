"""Needless copies between host and device, and results that are left on the wrong one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from fsdp_engine.adapters import reference as adapter
from fsdp_engine.contract.actions import Export
from fsdp_engine.contract.protocol import Losses, StepResult, TokenLoss
from fsdp_engine.engine.engine import FsdpEngine
from fsdp_engine.engine.normalise import GlobalCounts
from fsdp_engine.workload.batches import LocalBatch, MicroBatch
from tests.faults.planting import Planted

Named = Iterator[tuple[str, Tensor]]


class _ReadsEveryLoss(FsdpEngine):
    def _share(
        self, batch: LocalBatch, indices: tuple[int, ...], loss: TokenLoss, counts: GlobalCounts
    ) -> Tensor:
        def logging(output: object, micro_batch: MicroBatch) -> Tensor:
            losses = loss(output, micro_batch)
            self._log = [value.item() for value in losses.detach().flatten()]
            return losses

        return super()._share(batch, indices, logging, counts)


class LossReadPerToken(Planted):
    """Every token's loss is read by the host, one wait each."""

    exchanged = ((adapter, "FsdpEngine", _ReadsEveryLoss),)


class _ReadsNorms(FsdpEngine):
    def step(self) -> StepResult:
        for part in self.gradients():
            if part.data is not None:
                part.data.norm().item()
        return super().step()


class NormReadPerParameter(Planted):
    """The host waits for a norm of every parameter in a step."""

    exchanged = ((adapter, "FsdpEngine", _ReadsNorms),)


class _ChecksForward(FsdpEngine):
    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)

        def check(_module: nn.Module, _inputs: object, output: object) -> None:
            if isinstance(output, Tensor):
                assert not bool(output.isnan().all())

        for module in self.module.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(check)


class CheckedInForward(Planted):
    """A check for NaN in the forward of every layer, which waits for the device."""

    exchanged = ((adapter, "FsdpEngine", _ChecksForward),)


class _VisitsHost(FsdpEngine):
    def forward_backward(self, batch: LocalBatch, loss: TokenLoss) -> Losses:
        for part in self.parameters():
            if part.data is not None:
                part.data.copy_(part.data.cpu())
        return super().forward_backward(batch, loss)


class ParametersVisitHost(Planted):
    """Parameters are loaded and offloaded around a batch though nothing is offloaded."""

    exchanged = ((adapter, "FsdpEngine", _VisitsHost),)


class _ExportsThroughHost(FsdpEngine):
    def export(self, action: Export) -> Named:
        for name, tensor in super().export(action):
            yield name, tensor.cpu().to(tensor.device)


class ExportedThroughHost(Planted):
    """Every exported tensor goes to the host and back."""

    exchanged = ((adapter, "FsdpEngine", _ExportsThroughHost),)


class _StagesModel(FsdpEngine):
    def export(self, action: Export) -> Named:
        parts = [part for part in self.parameters() if part.data is not None]
        for part in parts:
            assert part.data is not None
            part.data.copy_(part.data.to("cpu"))
        yield from super().export(action)


class StagedWithoutNeed(Planted):
    """An export stages the whole model though it is on the device already."""

    exchanged = ((adapter, "FsdpEngine", _StagesModel),)


class _ExportsOnHost(FsdpEngine):
    def export(self, action: Export) -> Named:
        buffers = {name for name, _ in self.module.named_buffers()}
        for name, tensor in super().export(action):
            small = tensor.dim() < 2 or name in buffers
            yield name, tensor.cpu() if small else tensor


class SmallTensorsLeftOnHost(Planted):
    """Vectors and buffers are exported on the host."""

    exchanged = ((adapter, "FsdpEngine", _ExportsOnHost),)

"""Faults that a device alone shows: memory that stays, needless copies, forgotten waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fsdp_engine.adapters import reference as adapter
from fsdp_engine.contract.actions import Export
from fsdp_engine.contract.protocol import Losses, StepResult, TokenLoss
from fsdp_engine.engine.engine import FsdpEngine
from fsdp_engine.engine.normalise import GlobalCounts
from fsdp_engine.workload.batches import LocalBatch, MicroBatch
from tests.faults.planting import Planted

Named = Iterator[tuple[str, Tensor]]


# ------------------------------------------------------------------ memory


class _Unsharded(FsdpEngine):
    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        if isinstance(self.module, FSDPModule):
            self.module.set_reshard_after_backward(False)


class NotFreedAfterBackward(Planted):
    """FSDP2 is told to keep parameters in full after a backward."""

    exchanged = ((adapter, "FsdpEngine", _Unsharded),)


class _Keeping(FsdpEngine):
    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._kept: list[Any] = []

    def _share(
        self, batch: LocalBatch, indices: tuple[int, ...], loss: TokenLoss, counts: GlobalCounts
    ) -> Tensor:
        def keeping(output: object, micro_batch: MicroBatch) -> Tensor:
            losses = loss(output, micro_batch)
            self._kept.append(self.kept(output, losses, micro_batch))
            return losses

        return super()._share(batch, indices, keeping, counts)

    @staticmethod
    def kept(output: object, losses: Tensor, micro_batch: MicroBatch) -> Any:
        raise NotImplementedError


class _KeepsOutputs(_Keeping):
    @staticmethod
    def kept(output: object, losses: Tensor, micro_batch: MicroBatch) -> Any:  # noqa: ARG004
        return output


class OutputsKept(Planted):
    """The module's outputs of all micro-batches stay alive."""

    exchanged = ((adapter, "FsdpEngine", _KeepsOutputs),)


class _KeepsLosses(_Keeping):
    @staticmethod
    def kept(output: object, losses: Tensor, micro_batch: MicroBatch) -> Any:  # noqa: ARG004
        return losses.sum() + losses.new_zeros(64)  # as metrics per token would be


class MetricsKeepGraphs(Planted):
    """Metrics are tensors with their graph, for every micro-batch."""

    exchanged = ((adapter, "FsdpEngine", _KeepsLosses),)


class _KeepsInputs(_Keeping):
    @staticmethod
    def kept(output: object, losses: Tensor, micro_batch: MicroBatch) -> Any:  # noqa: ARG004
        return micro_batch


class InputsKept(Planted):
    """Micro-batches stay on the device behind their use."""

    exchanged = ((adapter, "FsdpEngine", _KeepsInputs),)


class _ZeroesInPlace(FsdpEngine):
    def zero_grad(self) -> None:
        kept = [p.grad for p in self.module.parameters() if p.grad is not None]
        super().zero_grad()
        self._zeros = [grad.detach().zero_() for grad in kept]


class GradientBuffersKept(Planted):
    """Cleared gradients keep their memory."""

    exchanged = ((adapter, "FsdpEngine", _ZeroesInPlace),)


class _KeepsWeights(FsdpEngine):
    def forward_backward(self, batch: LocalBatch, loss: TokenLoss) -> Losses:
        self._copies = [p.detach().clone() for p in self.module.parameters()]
        return super().forward_backward(batch, loss)


class WeightsKeptTwice(Planted):
    """Copies of all weights, made for an export to come, stay."""

    exchanged = ((adapter, "FsdpEngine", _KeepsWeights),)


class _MasterCopy(FsdpEngine):
    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._master = [part.data.double() for part in self.parameters() if part.data is not None]


class MasterWeightsOnDevice(Planted):
    """A copy of the shards in high precision is on the device from the start."""

    exchanged = ((adapter, "FsdpEngine", _MasterCopy),)


class _GathersAhead(FsdpEngine):
    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        units = [m for m in self.module.modules() if isinstance(m, FSDPModule)]
        if units:
            self.module.set_modules_to_forward_prefetch(units[1:])  # type: ignore[operator]  # FSDP2's


class GatheredAllAhead(Planted):
    """Every unit is gathered before the first of them runs, and freed behind its forward."""

    exchanged = ((adapter, "FsdpEngine", _GathersAhead),)


class _CopiesActivations(FsdpEngine):
    def _share(
        self, batch: LocalBatch, indices: tuple[int, ...], loss: TokenLoss, counts: GlobalCounts
    ) -> Tensor:
        copies: list[Tensor] = []

        def copy(_module: nn.Module, _inputs: object, output: object) -> None:
            if isinstance(output, Tensor):
                copies.append(output.detach().double())

        handles = [m.register_forward_hook(copy) for m in self.module.modules()]
        try:
            return super()._share(batch, indices, loss, counts)
        finally:
            for handle in handles:
                handle.remove()


class ActivationsCopied(Planted):
    """Every layer's output is copied for a statistic, until the forward has ended."""

    exchanged = ((adapter, "FsdpEngine", _CopiesActivations),)


class _MakesScratch(FsdpEngine):
    def _share(
        self, batch: LocalBatch, indices: tuple[int, ...], loss: TokenLoss, counts: GlobalCounts
    ) -> Tensor:
        share = super()._share(batch, indices, loss, counts)
        scratch = [torch.empty_like(parameter) for parameter in self.module.parameters()]

        def use(_gradient: Tensor) -> None:
            for tensor in scratch:
                tensor.zero_()

        share.register_hook(use)  # type: ignore[no-untyped-call]  # so in torch
        return share


class ScratchForEveryParameter(Planted):
    """A buffer as large as the parameters is there during every backward, and gone behind it."""

    exchanged = ((adapter, "FsdpEngine", _MakesScratch),)


# ------------------------------------------------------------------ copies


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


# ------------------------------------------------------------------ order


@contextmanager
def _on_another_stream(*, waits: bool) -> Iterator[None]:
    module: Any = torch.get_device_module(torch.accelerator.current_accelerator())
    stream = module.Stream()
    if waits:
        stream.wait_stream(module.current_stream())
    with module.stream(stream):
        yield


class _StepsAside(FsdpEngine):
    def step(self) -> StepResult:
        with _on_another_stream(waits=True):
            return super().step()


class StepDoesNotWait(Planted):
    """The optimizer works on a stream of its own, and the next forward does not wait for it."""

    exchanged = ((adapter, "FsdpEngine", _StepsAside),)


class _ReadsLossEarly(FsdpEngine):
    def forward_backward(self, batch: LocalBatch, loss: TokenLoss) -> Losses:
        losses = super().forward_backward(batch, loss)
        last = torch.full((), losses.total, device=self._device)
        early = last.to("cpu", non_blocking=True)
        return Losses(total=float(early.double()), plan=losses.plan, notes=losses.notes)


class LossReadBeforeItArrived(Planted):
    """The loss is copied without blocking and read at once."""

    exchanged = ((adapter, "FsdpEngine", _ReadsLossEarly),)


class _CopiesInputsAside(FsdpEngine):
    def _share(
        self, batch: LocalBatch, indices: tuple[int, ...], loss: TokenLoss, counts: GlobalCounts
    ) -> Tensor:
        class _Aside(LocalBatch):
            def __init__(self) -> None: ...

            def select(self, chosen: Any) -> MicroBatch:
                moved = batch.select(chosen).to(device)
                with _on_another_stream(waits=True):
                    mask = moved.loss_mask.clone()
                return replace(moved, loss_mask=mask)

        device = self._device
        return super()._share(_Aside(), indices, loss, counts)


class InputsDoNotWait(Planted):
    """Masks are made on a stream for copies that nothing waits for."""

    exchanged = ((adapter, "FsdpEngine", _CopiesInputsAside),)


class _ExportsAside(FsdpEngine):
    def export(self, action: Export) -> Named:
        for name, tensor in super().export(action):
            with _on_another_stream(waits=True):
                copied = tensor.clone()
            yield name, copied


class ExportDoesNotWait(Planted):
    """Exported tensors are copied on a stream of their own, and given away before."""

    exchanged = ((adapter, "FsdpEngine", _ExportsAside),)


class _ReusesPinned(FsdpEngine):
    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._staging = torch.zeros(1, dtype=torch.float64).pin_memory()

    def forward_backward(self, batch: LocalBatch, loss: TokenLoss) -> Losses:
        for number in range(2):
            self._staging.fill_(number)
            self._staging.to(self._device, non_blocking=True)
        return super().forward_backward(batch, loss)


class StagingBufferReused(Planted):
    """A pinned buffer is written again while a copy from it is under way."""

    exchanged = ((adapter, "FsdpEngine", _ReusesPinned),)


class _ClipsAside(FsdpEngine):
    def step(self) -> StepResult:
        with _on_another_stream(waits=False):
            for part in self.gradients():
                if part.data is not None:
                    part.data.mul_(1.0)
        return super().step()


class GradientsScaledAside(Planted):
    """Gradients are scaled in place on a stream that does not wait for them."""

    exchanged = ((adapter, "FsdpEngine", _ClipsAside),)


class _FreesInUse(FsdpEngine):
    def forward_backward(self, batch: LocalBatch, loss: TokenLoss) -> Losses:
        losses = super().forward_backward(batch, loss)
        scratch = torch.ones(8, device=self._device)
        with _on_another_stream(waits=True):
            scratch.sum()
        del scratch
        torch.empty(8, device=self._device)
        return losses


class FreedWhileInUse(Planted):
    """A buffer of the default stream is freed while another stream reads it."""

    exchanged = ((adapter, "FsdpEngine", _FreesInUse),)

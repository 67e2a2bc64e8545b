"""Faults that a device alone shows: memory that stays, needless copies, forgotten waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fsdp_engine.adapters import reference as adapter
from fsdp_engine.contract.actions import Export
from fsdp_engine.contract.case import Case
from fsdp_engine.contract.protocol import Losses, StepResult, TokenLoss
from fsdp_engine.engine.engine import FsdpEngine
from fsdp_engine.engine.normalise import GlobalCounts
from fsdp_engine.workload.batches import LocalBatch, MicroBatch
from tests.faults.planting import Planted, plant

Named = Iterator[tuple[str, Tensor]]


class _Faulty(Planted):
    """The reference with another engine class."""

    engine: type[FsdpEngine]

    def plant_faults(self, case: Case) -> None:  # noqa: ARG002
        plant(adapter, "FsdpEngine", self.engine)


# ------------------------------------------------------------------ memory


class _Unsharded(FsdpEngine):
    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        if isinstance(self.module, FSDPModule):
            self.module.set_reshard_after_backward(False)


class NotFreedAfterBackward(_Faulty):
    """FSDP2 is told to keep parameters in full after a backward."""

    engine = _Unsharded


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


class OutputsKept(_Faulty):
    """The module's outputs of all micro-batches stay alive."""

    engine = _KeepsOutputs


class _KeepsLosses(_Keeping):
    @staticmethod
    def kept(output: object, losses: Tensor, micro_batch: MicroBatch) -> Any:  # noqa: ARG004
        return losses.sum() + losses.new_zeros(64)  # as metrics per token would be


class MetricsKeepGraphs(_Faulty):
    """Metrics are tensors with their graph, for every micro-batch."""

    engine = _KeepsLosses


class _KeepsInputs(_Keeping):
    @staticmethod
    def kept(output: object, losses: Tensor, micro_batch: MicroBatch) -> Any:  # noqa: ARG004
        return micro_batch


class InputsKept(_Faulty):
    """Micro-batches stay on the device behind their use."""

    engine = _KeepsInputs


class _ZeroesInPlace(FsdpEngine):
    def zero_grad(self) -> None:
        if getattr(self, "_begun", False):
            kept = [(p, p.grad) for p in self.module.parameters() if p.grad is not None]
            super().zero_grad()
            self._zeros = [grad.detach().zero_() for _, grad in kept]
        else:
            super().zero_grad()
        self._begun = True


class GradientBuffersKept(_Faulty):
    """Cleared gradients keep their memory."""

    engine = _ZeroesInPlace


class _KeepsExport(FsdpEngine):
    def export(self, action: Export) -> Named:
        self._exported = list(super().export(action))
        yield from self._exported

    def forward_backward(self, batch: LocalBatch, loss: TokenLoss) -> Losses:
        self._copies = [p.detach().clone() for p in self.module.parameters()]
        return super().forward_backward(batch, loss)


class WeightsKeptTwice(_Faulty):
    """Copies of all weights, made for an export to come, stay."""

    engine = _KeepsExport


class _MasterCopy(FsdpEngine):
    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._master = [part.data.double() for part in self.parameters() if part.data is not None]


class MasterWeightsOnDevice(_Faulty):
    """A copy of the shards in high precision is on the device from the start."""

    engine = _MasterCopy


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


class LossReadPerToken(_Faulty):
    """Every token's loss is read by the host, one wait each."""

    engine = _ReadsEveryLoss


class _ReadsNorms(FsdpEngine):
    def step(self) -> StepResult:
        for part in self.gradients():
            if part.data is not None:
                part.data.norm().item()
        self._told = [p.sum().item() for p in self.module.parameters() for _ in range(4)]
        return super().step()


class NormReadPerParameter(_Faulty):
    """The host waits for a norm of every parameter in a step."""

    engine = _ReadsNorms


class _ChecksForward(FsdpEngine):
    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)

        def check(_module: nn.Module, _inputs: object, output: object) -> None:
            if isinstance(output, Tensor):
                assert not bool(output.isnan().all())

        for module in self.module.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(check)


class CheckedInForward(_Faulty):
    """A check for NaN in the forward of every layer, which waits for the device."""

    engine = _ChecksForward


class _VisitsHost(FsdpEngine):
    def forward_backward(self, batch: LocalBatch, loss: TokenLoss) -> Losses:
        for part in self.parameters():
            if part.data is not None:
                part.data.copy_(part.data.cpu())
        return super().forward_backward(batch, loss)


class ParametersVisitHost(_Faulty):
    """Parameters are loaded and offloaded around a batch though nothing is offloaded."""

    engine = _VisitsHost


class _ExportsThroughHost(FsdpEngine):
    def export(self, action: Export) -> Named:
        for name, tensor in super().export(action):
            yield name, tensor.cpu().to(tensor.device)


class ExportedThroughHost(_Faulty):
    """Every exported tensor goes to the host and back."""

    engine = _ExportsThroughHost


class _StagesModel(FsdpEngine):
    def export(self, action: Export) -> Named:
        parts = [part for part in self.parameters() if part.data is not None]
        for part in parts:
            assert part.data is not None
            part.data.copy_(part.data.to("cpu"))
        yield from super().export(action)


class StagedWithoutNeed(_Faulty):
    """An export stages the whole model though it is on the device already."""

    engine = _StagesModel


class _ExportsOnHost(FsdpEngine):
    def export(self, action: Export) -> Named:
        buffers = {name for name, _ in self.module.named_buffers()}
        for name, tensor in super().export(action):
            small = tensor.dim() < 2 or name in buffers
            yield name, tensor.cpu() if small else tensor


class SmallTensorsLeftOnHost(_Faulty):
    """Vectors and buffers are exported on the host."""

    engine = _ExportsOnHost


# ------------------------------------------------------------------ order


@contextmanager
def _on_another_stream(*, waits: bool) -> Iterator[Any]:
    module: Any = torch.get_device_module(torch.accelerator.current_accelerator())
    stream = module.Stream()
    if waits:
        stream.wait_stream(module.current_stream())
    with module.stream(stream):
        yield stream


class _StepsAside(FsdpEngine):
    def step(self) -> StepResult:
        with _on_another_stream(waits=True):
            return super().step()


class StepDoesNotWait(_Faulty):
    """The optimizer works on a stream of its own, and the next forward does not wait for it."""

    engine = _StepsAside


class _ReadsLossEarly(FsdpEngine):
    def _share(
        self, batch: LocalBatch, indices: tuple[int, ...], loss: TokenLoss, counts: GlobalCounts
    ) -> Tensor:
        share = super()._share(batch, indices, loss, counts)
        self._early = share.detach().to("cpu", non_blocking=True)
        return share

    def forward_backward(self, batch: LocalBatch, loss: TokenLoss) -> Losses:
        self._read: list[Tensor] = []
        losses = super().forward_backward(batch, loss)
        last = torch.full((), losses.total, device=self._device)
        early = last.to("cpu", non_blocking=True)
        return Losses(total=float(early.double()), plan=losses.plan, notes=losses.notes)


class LossReadBeforeItArrived(_Faulty):
    """The loss is copied without blocking and read at once."""

    engine = _ReadsLossEarly


class _CopiesInputsAside(FsdpEngine):
    def _share(
        self, batch: LocalBatch, indices: tuple[int, ...], loss: TokenLoss, counts: GlobalCounts
    ) -> Tensor:
        class _Aside(LocalBatch):
            def __init__(self) -> None: ...

            def select(self, chosen: Any) -> MicroBatch:
                micro_batch = batch.select(chosen)
                with _on_another_stream(waits=True):
                    moved = micro_batch.to(device)
                    mask = moved.loss_mask.clone()
                return MicroBatch(
                    inputs=moved.inputs,
                    targets=moved.targets * 1,
                    loss_mask=mask,
                    indices=moved.indices,
                )

        device = self._device
        return super()._share(_Aside(), indices, loss, counts)


class InputsDoNotWait(_Faulty):
    """Masks are made on a stream for copies that nothing waits for."""

    engine = _CopiesInputsAside


class _ExportsAside(FsdpEngine):
    def export(self, action: Export) -> Named:
        for name, tensor in super().export(action):
            with _on_another_stream(waits=True):
                copied = tensor.clone()
            yield name, copied


class ExportDoesNotWait(_Faulty):
    """Exported tensors are copied on a stream of their own, and given away before."""

    engine = _ExportsAside


class _ReusesPinned(FsdpEngine):
    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._staging = torch.zeros(1, dtype=torch.float64).pin_memory()

    def forward_backward(self, batch: LocalBatch, loss: TokenLoss) -> Losses:
        for number in range(2):
            self._staging.fill_(number)
            self._staging.to(self._device, non_blocking=True)
        return super().forward_backward(batch, loss)


class StagingBufferReused(_Faulty):
    """A pinned buffer is written again while a copy from it is under way."""

    engine = _ReusesPinned


class _ClipsAside(FsdpEngine):
    def step(self) -> StepResult:
        with _on_another_stream(waits=False):
            for part in self.gradients():
                if part.data is not None:
                    part.data.mul_(1.0)
        return super().step()


class GradientsScaledAside(_Faulty):
    """Gradients are scaled in place on a stream that does not wait for them."""

    engine = _ClipsAside


class _FreesInUse(FsdpEngine):
    def forward_backward(self, batch: LocalBatch, loss: TokenLoss) -> Losses:
        losses = super().forward_backward(batch, loss)
        scratch = torch.ones(8, device=self._device)
        with _on_another_stream(waits=True):
            scratch.sum()
        del scratch
        torch.empty(8, device=self._device)
        return losses


class FreedWhileInUse(_Faulty):
    """A buffer of the default stream is freed while another stream reads it."""

    engine = _FreesInUse

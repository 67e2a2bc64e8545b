"""Forgotten waits: work on another stream, copies that do not block, memory in use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fsdp_engine.adapters import reference as adapter
from fsdp_engine.contract.actions import Export
from fsdp_engine.contract.protocol import Losses, StepResult, TokenLoss
from fsdp_engine.engine.engine import FsdpEngine
from fsdp_engine.engine.normalise import GlobalCounts
from fsdp_engine.workload.batches import LocalBatch, MicroBatch
from tests.faults.planting import Planted

Named = Iterator[tuple[str, Tensor]]


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

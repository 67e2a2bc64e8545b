"""Memory that stays on the device, or is there for a moment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fsdp_engine.adapters import reference as adapter
from fsdp_engine.contract.protocol import Losses, TokenLoss
from fsdp_engine.engine.engine import FsdpEngine
from fsdp_engine.engine.normalise import GlobalCounts
from fsdp_engine.workload.batches import LocalBatch, MicroBatch
from tests.faults.planting import Planted

Named = Iterator[tuple[str, Tensor]]


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

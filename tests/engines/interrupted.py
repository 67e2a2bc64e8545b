"""The reference engine, interrupted on purpose before the batch that is recorded.

Each class spoils one batch on all ranks, expects the engine to be as good as new, and then runs
the batch that was asked for. What is observed must be what the plain reference shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from fsdp_engine.adapters.reference import Reference
from fsdp_engine.contract.case import Case
from fsdp_engine.contract.protocol import Losses, RankContext, TokenLoss
from fsdp_engine.engine.engine import FsdpEngine
from fsdp_engine.workload.batches import LocalBatch, MicroBatch
from fsdp_engine.workload.models import Block


class Interruption(Exception):
    """What a test raises in the middle of a batch."""


class _Interrupted(Reference):
    phase: ClassVar[Literal["forward", "loss", "backward"]]
    micro_batch: ClassVar[int]

    def build(self, case: Case, rank: RankContext) -> FsdpEngine:
        engine = super().build(case, rank)
        engine.forward_backward = partial(self._spoil_first, engine)  # type: ignore[method-assign]
        return engine

    def _spoil_first(self, engine: FsdpEngine, batch: LocalBatch, loss: TokenLoss) -> Losses:
        flags = _sync_flags(engine.module)
        training = [module.training for module in engine.module.modules()]
        try:
            with (
                _raising(engine.module, loss, self.phase, self.micro_batch) as raising_loss,
                engine.mode("train"),
            ):
                FsdpEngine.forward_backward(engine, batch, raising_loss)
        except Interruption:
            pass
        else:
            raise AssertionError("nothing was interrupted")
        assert _sync_flags(engine.module) == flags
        assert [module.training for module in engine.module.modules()] == training
        assert all(shard.data is None for shard in engine.gradients())
        return FsdpEngine.forward_backward(engine, batch, loss)


class ForwardOfFirst(_Interrupted):
    phase, micro_batch = "forward", 0


class ForwardOfSecond(_Interrupted):
    phase, micro_batch = "forward", 1


class LossOfFirst(_Interrupted):
    phase, micro_batch = "loss", 0


class LossOfSecond(_Interrupted):
    phase, micro_batch = "loss", 1


class BackwardOfFirst(_Interrupted):
    phase, micro_batch = "backward", 0


class BackwardOfSecond(_Interrupted):
    phase, micro_batch = "backward", 1


class InfiniteOnRankZero(Reference):
    """The first batch's gradient is not finite, on rank 0 alone before the reduction."""

    def build(self, case: Case, rank: RankContext) -> FsdpEngine:
        engine = super().build(case, rank)
        spoilt: list[LocalBatch] = []

        def forward_backward(batch: LocalBatch, loss: TokenLoss) -> Losses:
            if spoilt or rank.rank:
                spoilt.append(batch)
                return FsdpEngine.forward_backward(engine, batch, loss)
            spoilt.append(batch)
            return FsdpEngine.forward_backward(
                engine, batch, lambda output, micro_batch: loss(output, micro_batch) * torch.inf
            )

        engine.forward_backward = forward_backward  # type: ignore[method-assign]
        return engine


class KeepsFlags(Reference):
    """Switches the reduction of one unit off before a batch: it must be off afterwards."""

    def build(self, case: Case, rank: RankContext) -> FsdpEngine:
        engine = super().build(case, rank)

        def forward_backward(batch: LocalBatch, loss: TokenLoss) -> Losses:
            _switch_off(next(_units(engine.module)))
            before = _sync_flags(engine.module)
            losses = FsdpEngine.forward_backward(engine, batch, loss)
            assert _sync_flags(engine.module) == before
            assert len(set(before)) == 2
            return losses

        engine.forward_backward = forward_backward  # type: ignore[method-assign]
        return engine


@contextmanager
def _raising(
    module: nn.Module, loss: TokenLoss, phase: str, micro_batch: int
) -> Iterator[TokenLoss]:
    """Raise in the given phase of the given micro-batch, half way through the model's units."""
    seen = {"forward": 0, "loss": 0, "backward": 0}

    def reached(name: str) -> None:
        seen[name] += 1
        if name == phase and seen[name] == micro_batch + 1:
            raise Interruption(f"{phase} of micro-batch {micro_batch}")

    def raising_loss(output: object, batch: MicroBatch) -> Tensor:
        token_losses = loss(output, batch)
        reached("loss")
        return token_losses

    def on_backward(_module: nn.Module, _arguments: object, output: Tensor) -> None:
        output.register_hook(lambda _: reached("backward"))  # type: ignore[no-untyped-call]

    block = next(m for m in module.modules() if isinstance(m, Block))
    handles = [
        block.register_forward_pre_hook(lambda *_: reached("forward")),
        block.register_forward_hook(on_backward),
    ]
    try:
        yield raising_loss
    finally:
        for handle in handles:
            handle.remove()


def _units(module: nn.Module) -> Iterator[nn.Module]:
    for submodule in module.modules():
        if (
            isinstance(submodule, (FSDPModule, FullyShardedDataParallel))
            and submodule is not module
        ):
            yield submodule


def _sync_flags(module: nn.Module) -> list[bool]:
    flags: list[bool] = []
    for unit in (module, *_units(module)):
        if isinstance(unit, FullyShardedDataParallel):
            flags.append(unit._sync_gradients)
        elif isinstance(unit, FSDPModule):
            flags += [g.reduce_grads for g in unit._get_fsdp_state()._fsdp_param_groups]
    return flags


def _switch_off(unit: nn.Module) -> None:
    if isinstance(unit, FullyShardedDataParallel):
        state: Any = unit
        state._sync_gradients = False
    elif isinstance(unit, FSDPModule):
        unit.set_requires_gradient_sync(False)

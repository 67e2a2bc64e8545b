"""Failures put into a training action from outside: an exception, or a loss that is not finite."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Literal, NoReturn

import torch
from torch import Tensor, nn

from fsdp_engine.contract.actions import Interrupt, Poison
from fsdp_engine.contract.protocol import TokenLoss
from fsdp_engine.torch_private.autograd import differentiable, hook_gradient
from fsdp_engine.torch_private.shards import plain_name
from fsdp_engine.workload.batches import MicroBatch


class InjectedFailure(Exception):
    """The exception that ends an interrupted batch."""


class Interruption:
    """Raises `InjectedFailure` where an action says, once; `happened` tells whether it did.

    A micro-batch is what begins with a root forward.
    """

    def __init__(self, action: Interrupt, units: Iterable[str]) -> None:
        self.happened = False
        self._action = action
        self._units = frozenset(units)
        self._micro_batch = -1
        self._waiting = False

    @contextmanager
    def watching(self, root: nn.Module) -> Iterator[None]:
        """Raise inside, in the forward or backward of `root`."""
        handles = [root.register_forward_pre_hook(self._begin, prepend=True)]
        handles += [module.register_forward_hook(self._behind) for module in self._modules(root)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def in_loss(self, loss: TokenLoss) -> TokenLoss:
        """The loss, which raises where the action says `loss`."""

        def interrupted(output: object, micro_batch: MicroBatch) -> Tensor:
            if self._is_at("loss"):
                self._raise()
            return loss(output, micro_batch)

        return interrupted

    def _modules(self, root: nn.Module) -> list[nn.Module]:
        """The units as they are wrapped, and the root, which is behind all of them."""
        outermost: dict[str, nn.Module] = {}
        for name, module in root.named_modules():
            outermost.setdefault(plain_name(name), module)
        return [module for name, module in outermost.items() if name in self._units] + [root]

    def _begin(self, _module: nn.Module, _arguments: object) -> None:
        self._micro_batch += 1
        self._waiting = False

    def _behind(self, _module: nn.Module, _arguments: object, output: object) -> None:
        if self._is_at("forward"):
            self._raise()
        if self._is_at("backward") and not self._waiting:
            for tensor in differentiable(output):
                hook_gradient(tensor, self._raise)
                self._waiting = True
                return

    def _is_at(self, phase: Literal["forward", "loss", "backward"]) -> bool:
        here = (self._action.phase, self._action.micro_batch) == (phase, self._micro_batch)
        return here and not self.happened

    def _raise(self) -> NoReturn:
        self.happened = True
        raise InjectedFailure(f"{self._action.phase} of micro-batch {self._micro_batch}")


def poisoned(loss: TokenLoss, action: Poison, rank: int) -> TokenLoss:
    """The loss, with one sequence's made non-finite on the action's rank."""
    if rank != action.rank:
        return loss

    def spoilt(output: object, micro_batch: MicroBatch) -> Tensor:
        losses = loss(output, micro_batch)
        factors = torch.ones_like(losses)
        for row, index in enumerate(micro_batch.indices):
            if index == action.sequence:
                factors[row] = float(action.value)
        return losses * factors

    return spoilt


def is_injected(error: BaseException | None) -> bool:
    """Whether `error` is the injected exception or was raised because of it."""
    while error is not None:
        if isinstance(error, InjectedFailure):
            return True
        error = error.__cause__ or error.__context__
    return False

"""When gradients are reduced: after every micro-batch, or once after the last.

Eager sync keeps shards of gradients between micro-batches, deferred sync the whole model's
unsharded ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from fsdp_engine.torch_private.deferred import before_deferred_backward, before_last_backward
from fsdp_engine.torch_private.streams import order_zeroed_gradients
from fsdp_engine.torch_private.sync_flags import without_reduction
from fsdp_engine.torch_private.trainable import register_frozen


class GradientSync:
    """The sync switch of one wrapped module.

    `replicated`: FSDP1 with NO_SHARD, which reduces the sum of the new and the already reduced
    gradient. Under eager sync the reduced ones are therefore put aside and added afterwards, in
    the storage dtype, as all sharded strategies do.
    """

    def __init__(self, module: nn.Module, *, deferred: bool, replicated: bool) -> None:
        self._module = module
        self._deferred = deferred
        self._replicated = replicated

    @contextmanager
    def micro_batch(self, number: int, count: int) -> Iterator[None]:
        """Forward and backward of micro-batch `number` of `count` run inside.

        The flags that were set before come back, also after an exception.
        """
        with self._synchronised(number, count):
            yield
        if isinstance(self._module, FullyShardedDataParallel) and self._replicated:
            register_frozen(self._module)

    @contextmanager
    def _synchronised(self, number: int, count: int) -> Iterator[None]:
        last = number == count - 1
        if self._deferred and not last:
            with self._without_reduction():
                yield
        elif self._replicated and not self._deferred and number:
            aside = self._put_aside()
            yield
            self._add(aside)
        else:
            yield

    def before_backward(self, number: int, count: int, loss: Tensor) -> None:
        """To call between forward and backward of micro-batch `number`."""
        if not number:
            order_zeroed_gradients(self._module)
        if not self._deferred or count == 1:
            return
        if number < count - 1:
            before_deferred_backward(self._module)
        else:
            before_last_backward(self._module, loss)

    def _without_reduction(self) -> AbstractContextManager[None]:
        if isinstance(self._module, FullyShardedDataParallel):
            return cast("AbstractContextManager[None]", self._module.no_sync())
        return without_reduction(self._module)

    def _put_aside(self) -> dict[nn.Parameter, Tensor]:
        aside: dict[nn.Parameter, Tensor] = {}
        for parameter in self._module.parameters():
            if parameter.grad is not None:
                aside[parameter] = parameter.grad
                parameter.grad = None
        return aside

    @torch.no_grad()
    def _add(self, aside: dict[nn.Parameter, Tensor]) -> None:
        for parameter, grad in aside.items():
            if parameter.grad is None:
                parameter.grad = grad
            else:
                parameter.grad.add_(grad)

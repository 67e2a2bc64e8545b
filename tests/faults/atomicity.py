"""Faults in what an exception in the middle of a batch leaves behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule

from fsdp_engine.adapters import reference as adapter
from fsdp_engine.engine import engine as engine_module
from fsdp_engine.engine.engine import FsdpEngine
from fsdp_engine.engine.gradient_sync import GradientSync
from fsdp_engine.engine.usage import Usage
from fsdp_engine.torch_private.accumulators import clear_gradients, fsdp2_groups, reset
from tests.faults.planting import Planted


def _all_but_accumulators(root: nn.Module) -> None:
    if isinstance(root, FSDPModule):
        root.reset_iter_state()
        clear_gradients(root)
    else:
        reset(root)


class AccumulatorsSurvive(Planted):
    """What FSDP2 has accumulated of an interrupted deferred batch is not cleared."""

    exchanged = ((engine_module, "reset", _all_but_accumulators),)


class NotResetAfterError(Planted):
    """After an exception gradients are cleared, and nothing else: parameters stay gathered."""

    exchanged = ((engine_module, "reset", clear_gradients),)


class _LeavesFlags(GradientSync):
    def _without_reduction(self) -> AbstractContextManager[None]:
        if isinstance(self._module, FSDPModule):
            return _flags_off(self._module)
        return super()._without_reduction()


@contextmanager
def _flags_off(module: nn.Module) -> Iterator[None]:
    groups = [group for _, group in fsdp2_groups(module)]
    before = [(group.reduce_grads, group.all_reduce_grads) for group in groups]
    for group in groups:
        group.reduce_grads = group.all_reduce_grads = False
    yield
    for group, flags in zip(groups, before, strict=True):
        group.reduce_grads, group.all_reduce_grads = flags


class SyncLeftOff(Planted):
    """An exception in a deferred micro-batch leaves the gradient sync switched off."""

    exchanged = ((engine_module, "GradientSync", _LeavesFlags),)


class _KeepsUsage(Usage):
    def clear(self) -> None:
        self.end_micro_batch()


class UsageKept(Planted):
    """A parameter that an earlier batch used counts as used in all later ones."""

    exchanged = ((engine_module, "Usage", _KeepsUsage),)


class _CountsInterrupted(FsdpEngine):
    _interrupted = False

    def _abandon(self) -> None:
        super()._abandon()
        self._interrupted = True

    def zero_grad(self) -> None:
        if self._interrupted:
            self._optimizer("zero_grad").lr_step()
            self._interrupted = False
        super().zero_grad()


class InterruptedBatchCounted(Planted):
    """The schedule advances for a batch that never came to its end."""

    exchanged = ((adapter, "FsdpEngine", _CountsInterrupted),)

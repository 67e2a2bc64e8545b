"""Engines that are right in a process's first case and leave something behind for the next one.

Others change what surrounds them, which must not reach a case, or make noise, or fail to build.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from fsdp_engine.adapters.torch_fsdp import Fsdp2Trainee, TorchFsdp2
from fsdp_engine.contract.case import Case
from fsdp_engine.contract.protocol import LocalShard, Losses, RankContext, TokenLoss
from fsdp_engine.workload.batches import LocalBatch


class _Trainee(Fsdp2Trainee):
    """Does `leak` when the forward and backward are over."""

    leak: Callable[[], object]

    def forward_backward(self, batch: LocalBatch, loss: TokenLoss) -> Losses:
        losses = super().forward_backward(batch, loss)
        type(self).leak()
        return losses


class _Engine(TorchFsdp2):
    trainee: type[Fsdp2Trainee]

    def build(self, case: Case, rank: RankContext) -> Fsdp2Trainee:
        return self.trainee(super().build(case, rank).module, case, torch.device(rank.device))


_scales = [1.0]


class _ScaledTrainee(_Trainee):
    leak = staticmethod(lambda: _scales.append(2.0))

    def gradients(self) -> Iterator[LocalShard]:
        for shard in super().gradients():
            yield shard if shard.data is None else replace(shard, data=shard.data * self._scale)

    def __init__(self, module: nn.Module, case: Case, device: torch.device) -> None:
        super().__init__(module, case, device)
        self._scale = _scales[-1]


class LeavesAGlobal(_Engine):
    """A scale in a global of its module is another one from the second case on."""

    trainee = _ScaledTrainee


class _HookedTrainee(_Trainee):
    @staticmethod
    def leak() -> None:
        def doubled(module: nn.Module, _: Any, output: Any) -> Any:
            return output * 2 if isinstance(module, nn.Linear) else output

        register_module_forward_hook(doubled)


class LeavesAHook(_Engine):
    """A hook on every module of the process is not removed."""

    trainee = _HookedTrainee


class _AutocastTrainee(_Trainee):
    @staticmethod
    def leak() -> None:
        torch.set_autocast_dtype("cpu", torch.bfloat16)
        torch.set_autocast_enabled("cpu", True)  # noqa: FBT003  torch's own signature


class LeavesAutocastOn(_Engine):
    """Autocast is entered and never left."""

    trainee = _AutocastTrainee


class _NoGradientTrainee(_Trainee):
    leak = staticmethod(lambda: torch.set_grad_enabled(False))


class LeavesGradientsOff(_Engine):
    """Gradients are switched off and never on again: the next backward raises."""

    trainee = _NoGradientTrainee


class _SurroundingsTrainee(_Trainee):
    @staticmethod
    def leak() -> None:
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(0)
        torch.set_num_threads(torch.get_num_threads() + 1)


class ChangesItsSurroundings(_Engine):
    """Default dtype, random state and number of threads are others after every case."""

    trainee = _SurroundingsTrainee


class _NoisyTrainee(_Trainee):
    @staticmethod
    def leak() -> None:
        line = "x" * 4095 + "\n"
        for _ in range(1024):
            sys.stdout.write(line)
            os.write(2, line.encode())
        sys.stdout.flush()


class Noisy(_Engine):
    """Writes 4 MiB to each of its streams, more than any pipe holds."""

    trainee = _NoisyTrainee


class RaisesInBuild(TorchFsdp2):
    """Rank 1 fails to build while the others wait for it in the construction of the mesh."""

    def build(self, case: Case, rank: RankContext) -> Fsdp2Trainee:
        if rank.rank == 1:
            raise ArithmeticError("rank 1 cannot build")
        torch.distributed.all_reduce(torch.ones(1))
        return super().build(case, rank)

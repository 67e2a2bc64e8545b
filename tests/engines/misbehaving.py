"""Engines that go wrong in one way each, for the tests of the world around them."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Iterator
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_engine.adapters.torch_fsdp import Fsdp2Trainee, TorchFsdp2
from fsdp_engine.contract.actions import Export
from fsdp_engine.contract.case import Case
from fsdp_engine.contract.errors import ConfigError
from fsdp_engine.contract.protocol import Losses, RankContext, TokenLoss
from fsdp_engine.workload.batches import LocalBatch, MicroBatch

BAD_SEED = 666
"""The engines misbehave in cases with this seed."""


class _Trainee(Fsdp2Trainee):
    """Does `misbehave` before each forward and backward."""

    def forward_backward(self, batch: LocalBatch, loss: TokenLoss) -> Losses:
        if self.case.seed == BAD_SEED:
            self.misbehave(dist.get_rank())
        return super().forward_backward(batch, loss)

    def misbehave(self, rank: int) -> None:
        raise NotImplementedError


class _Engine(TorchFsdp2):
    trainee: type[_Trainee]

    def build(self, case: Case, rank: RankContext) -> Fsdp2Trainee:
        built = super().build(case, rank)
        return self.trainee(built.module, case, torch.device(rank.device))


class _HangingTrainee(_Trainee):
    def misbehave(self, rank: int) -> None:
        if rank == 1:
            threading.Event().wait()


class Hangs(_Engine):
    """Rank 1 waits for ever outside a collective."""

    trainee = _HangingTrainee


class _HoldingTrainee(_Trainee):
    def misbehave(self, rank: int) -> None:
        if rank == 1:
            ctypes.PyDLL(None).pause()


class HoldsTheInterpreter(_Engine):
    """Rank 1 waits for ever in C, without letting other threads run."""

    trainee = _HoldingTrainee


class _DesynchronisedTrainee(_Trainee):
    def misbehave(self, rank: int) -> None:
        if rank == 1:
            dist.broadcast(torch.zeros(2, dtype=torch.int64), src=0)


class Desynchronised(_Engine):
    """Rank 1 waits for a broadcast, the others for an all-reduce of as many bytes."""

    trainee = _DesynchronisedTrainee


class _KilledTrainee(_Trainee):
    def misbehave(self, rank: int) -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


class KillsItself(_Engine):
    """Rank 1 is killed."""

    trainee = _KilledTrainee


class _RaisingTrainee(_Trainee):
    def misbehave(self, rank: int) -> None:
        if rank == 1:
            raise ArithmeticError("only rank 1 raises")


class RaisesOnOneRank(_Engine):
    """Rank 1 raises, the others wait for it in a collective."""

    trainee = _RaisingTrainee


class RefusesItsConfiguration(TorchFsdp2):
    """`ConfigError` before any collective."""

    def build(self, case: Case, rank: RankContext) -> Fsdp2Trainee:  # noqa: ARG002  refused anyway
        raise ConfigError(f"fsdp_size: 3 is not legal in a world of {rank.world_size}")


class RefusesCases(TorchFsdp2):
    """Supports nothing."""

    def supports(self, case: Case) -> str | None:  # noqa: ARG002  the same for every case
        return "this engine supports nothing"


_num_builds = 0


class _RememberingTrainee(Fsdp2Trainee):
    def forward_backward(self, batch: LocalBatch, loss: TokenLoss) -> Losses:
        losses = super().forward_backward(batch, loss)
        if self.case.seed == BAD_SEED:
            raise ArithmeticError("every rank raises")
        notes = (f"build {_num_builds} of this process", f"pid {os.getpid()}")
        return Losses(total=losses.total, plan=losses.plan, notes=notes)


class Remembers(TorchFsdp2):
    """Tells how often it was built in its process; raises for one seed."""

    def build(self, case: Case, rank: RankContext) -> Fsdp2Trainee:
        global _num_builds  # state that would leak between cases is the point
        _num_builds += 1
        return _RememberingTrainee(
            super().build(case, rank).module, case, torch.device(rank.device)
        )


class _TalkativeTrainee(Fsdp2Trainee):
    def forward_backward(self, batch: LocalBatch, loss: TokenLoss) -> Losses:
        def agreeing_loss(output: object, micro_batch: MicroBatch) -> Tensor:
            dist.all_reduce(torch.ones(3), op=dist.ReduceOp.MIN)
            return loss(output, micro_batch)

        return super().forward_backward(batch, agreeing_loss)

    def export(self, action: Export) -> Iterator[tuple[str, Tensor]]:  # noqa: ARG002
        group = dist.group.WORLD
        assert group is not None
        ones = torch.ones(5, dtype=torch.bfloat16)
        with torch.inference_mode():
            dist.all_reduce(torch.ones(4), op=dist.ReduceOp.MAX)
        dist.all_gather([torch.empty_like(ones) for _ in range(group.size())], ones)
        dist.broadcast(ones, src=0)
        functional = torch.ops._c10d_functional
        for result in (
            functional.all_reduce(ones, "sum", group.group_name),
            functional.all_gather_into_tensor(ones, group.size(), group.group_name),
            functional.reduce_scatter_tensor(torch.ones(8), "avg", 2, group.group_name),
        ):
            functional.wait_tensor(result)
        yield "ones", ones


class Talkative(TorchFsdp2):
    """Issues collectives in every way there is."""

    def build(self, case: Case, rank: RankContext) -> Fsdp2Trainee:
        return _TalkativeTrainee(super().build(case, rank).module, case, torch.device(rank.device))


class _TensorLossTrainee(Fsdp2Trainee):
    def forward_backward(self, batch: LocalBatch, loss: TokenLoss) -> Losses:
        losses = super().forward_backward(batch, loss)
        return Losses(total=cast(float, torch.tensor(losses.total)), plan=losses.plan)


class ReturnsATensor(TorchFsdp2):
    """The total loss is a tensor, which is no plain data."""

    def build(self, case: Case, rank: RankContext) -> Fsdp2Trainee:
        return _TensorLossTrainee(super().build(case, rank).module, case, torch.device(rank.device))

"""The typical case as it is usually tested: torch's own base class, ranks spawned for each test.

The ranks shard the model, run their micro-batches and hold the gathered gradients against those of
the whole batch on one process, with the default tolerances.
"""

from __future__ import annotations

import logging
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.common_distributed import MultiProcessTestCase

from fsdp_engine.adapters.torch_fsdp import TorchFsdp2
from fsdp_engine.contract.case import Case
from fsdp_engine.contract.protocol import RankContext
from fsdp_engine.workload.batches import global_batch, local_batch
from fsdp_engine.workload.losses import token_loss
from fsdp_engine.workload.models import build_model, module_arguments
from tests.bench.typical import typical_case

# It tells of every process it starts.
logging.getLogger("torch.testing._internal.common_distributed").setLevel(logging.WARNING)


class _GradientTest(MultiProcessTestCase):
    num_ranks = 2

    @property
    def world_size(self) -> int:
        return self.num_ranks

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def test_gradients(self) -> None:
        torch.set_num_threads(1)
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)
        case = typical_case(self.world_size)
        context = RankContext(rank=self.rank, world_size=self.world_size)
        trainee = TorchFsdp2().build(case, context)
        trainee.forward_backward(local_batch(case, 0, self.rank), token_loss(case))
        wanted = _whole_batch_gradients(case)
        for name, parameter in trainee.module.named_parameters():
            torch.testing.assert_close(_full(parameter.grad), wanted[name])


class TestOnTwoRanks(_GradientTest):
    num_ranks = 2


class TestOnFourRanks(_GradientTest):
    num_ranks = 4


CASES: dict[int, type[Any]] = {2: TestOnTwoRanks, 4: TestOnFourRanks}


def _full(gradient: Tensor | None) -> Tensor:
    assert isinstance(gradient, DTensor)
    return gradient.full_tensor()


def _whole_batch_gradients(case: Case) -> dict[str, Tensor]:
    module: nn.Module = build_model(case).train()
    batch = global_batch(case, 0)
    everything = batch.select(range(len(batch)))
    losses = token_loss(case)(module(**module_arguments(case, everything.inputs)), everything)
    loss = (losses * everything.loss_mask).sum() / everything.loss_mask.sum()
    loss.backward()  # type: ignore[no-untyped-call]  # so in torch
    return {name: cast(Tensor, p.grad) for name, p in module.named_parameters()}

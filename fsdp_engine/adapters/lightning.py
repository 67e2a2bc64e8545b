"""Lightning Fabric's `ModelParallelStrategy` as an engine: FSDP2 by a function of the user.

Judged is what Fabric adds to torch: its wrapper of the module and of the optimizer,
`no_backward_sync`, `backward`, `clip_gradients`, `save` and `load`. The function that shards is
that of its documentation: `fully_shard` on every block and on the root, over the mesh's axis
`data_parallel`. Checked with lightning-fabric 2.6.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import lightning_fabric
import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments import LightningEnvironment
from lightning_fabric.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_engine.adapters.numerics import fsdp2_numerics
from fsdp_engine.adapters.plain_loop import PlainEngine, optimizer_of
from fsdp_engine.adapters.torch_fsdp import (
    Fsdp2Trainee,
    refusal,
    shard_units,
)
from fsdp_engine.contract.actions import ACTIONS, OFFLOAD_ACTIONS
from fsdp_engine.contract.case import Case
from fsdp_engine.contract.errors import UnsupportedCase
from fsdp_engine.contract.observation import Numerics
from fsdp_engine.contract.protocol import Capabilities, RankContext
from fsdp_engine.workload.models import build_model, module_arguments


class Lightning(PlainEngine):
    """`Fabric` with a `ModelParallelStrategy` on the host."""

    def capabilities(self) -> Capabilities:
        return Capabilities(
            name="lightning",
            versions={
                "lightning-fabric": lightning_fabric.__version__,
                "torch": torch.__version__,
            },
            strategies=("fsdp2",),
            # A damaged checkpoint need not be refused: Fabric does not promise to look.
            actions=tuple(kind for kind in ACTIONS if kind not in ("reject", *OFFLOAD_ACTIONS)),
            without=("adapter", "reshard"),
            lacks=({"mesh": "grid"}, {"mesh": "column"}, {"mesh": "row"}),
        )

    def supports(self, case: Case) -> str | None:
        if case.mesh.ndim == 2:
            return "the strategy's second axis is for tensor parallelism, it has none for replicas"
        return refusal("fsdp2", case)

    def numerics(self, case: Case) -> Numerics:
        return fsdp2_numerics(case)

    def build(self, case: Case, rank: RankContext) -> LightningTrainee:
        if rank.device != "cpu":
            raise UnsupportedCase(f"Fabric knows no device {rank.device}")

        def parallelize(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
            shard_units(module, case, mesh=mesh["data_parallel"])
            return module

        fabric = Fabric(
            accelerator="cpu",
            devices=rank.world_size,
            strategy=ModelParallelStrategy(
                parallelize, data_parallel_size=rank.world_size, tensor_parallel_size=1
            ),
            plugins=_Ranks(rank),
        )
        fabric.launch()
        wrapped = fabric.setup_module(build_model(case))
        optimizer: Any = fabric.setup_optimizers(optimizer_of(wrapped, case.optimizer))
        trainee = LightningTrainee(
            wrapped.module, case, torch.device(rank.device), optimizer=optimizer
        )
        trainee.fabric, trainee.wrapped = fabric, wrapped
        return trainee


class LightningTrainee(Fsdp2Trainee):
    """`wrapped` is Fabric's own module around the sharded one."""

    fabric: Fabric
    wrapped: Any

    def forward(self, inputs: dict[str, Tensor]) -> object:
        return self.wrapped(**module_arguments(self.case, inputs))

    def backward(self, loss: Tensor) -> None:
        self.fabric.backward(loss)

    def gradient_sync(self, *, enabled: bool) -> AbstractContextManager[None]:
        sync: AbstractContextManager[None] = self.fabric.no_backward_sync(
            self.wrapped, enabled=not enabled
        )
        return sync

    def clip(self, max_norm: float) -> Tensor:
        norm = self.fabric.clip_gradients(
            self.wrapped, self.optimizer, max_norm=max_norm, error_if_nonfinite=False
        )
        assert norm is not None
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def save(self, path: str, *, max_to_keep: int | None = None) -> None:
        """Schedule and random state are the user's own: Fabric stores what it is given."""
        saved = list(_saved(path))
        number = 1 + max((number for number, _ in saved), default=-1)
        random: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(random, torch.get_rng_state())
        state = self._state | {"schedule": self.schedule.state_dict(), "random": random}
        self.fabric.save(Path(path, f"checkpoint_{number}"), state)
        if dist.get_rank() == 0 and max_to_keep is not None:  # Fabric keeps what it has saved
            for _, old in sorted(_saved(path))[:-max_to_keep]:
                shutil.rmtree(old)

    def load(self, path: str) -> None:
        _, newest = max(_saved(path))
        state = self._state | {"schedule": None, "random": None}
        self.fabric.load(newest, state)
        self.schedule.load_state_dict(state["schedule"])
        torch.set_rng_state(state["random"][dist.get_rank()])

    @property
    def _state(self) -> dict[str, Any]:
        return {"model": self.wrapped, "optimizer": self.optimizer}


class _Ranks(LightningEnvironment):
    """The ranks are there already, and so is their process group."""

    def __init__(self, rank: RankContext) -> None:
        super().__init__()
        self._rank = rank.rank

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def local_rank(self) -> int:
        return self._rank


def _saved(path: str) -> Iterator[tuple[int, Path]]:
    for folder in Path(path).glob("checkpoint_*"):
        yield int(folder.name.rpartition("_")[2]), folder

"""`DistributedDataParallel` as a control: no sharding, one sum over the replicas.

What every engine must agree with where a mesh has replicas alone. DDP averages the running sum of
all micro-batches so far, so only one reduction per batch is judged: deferred sync, or one
micro-batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fsdp_engine.adapters.numerics import fsdp1_numerics
from fsdp_engine.adapters.plain_loop import PlainEngine, PlainTrainee
from fsdp_engine.adapters.torch_fsdp import full_copies, refusal
from fsdp_engine.contract.actions import ACTIONS, CHECKPOINT_ACTIONS, OFFLOAD_ACTIONS, Export
from fsdp_engine.contract.case import Case
from fsdp_engine.contract.observation import Level, Numerics, Unit
from fsdp_engine.contract.protocol import Capabilities, RankContext
from fsdp_engine.workload.models import build_model, module_arguments, parameter_names

_LEFT_OUT = (
    *("poison", "interrupt", "restore", "freeze", "unfreeze"),
    *(*CHECKPOINT_ACTIONS, *OFFLOAD_ACTIONS),
)
"""DDP learns only once what trains. Behind the first batch it orders its buckets anew, so the next
one is summed another way round: no two programs with a batch more or less agree in every bit.
"""


class TorchDdp(PlainEngine):
    """`DistributedDataParallel` around the whole module."""

    def capabilities(self) -> Capabilities:
        others = ("line2", "line3", "line4", "grid", "row", "wide_line", "wide_grid", "single")
        mixed = ("fp32/bf16/fp32", "fp32/bf16/bf16", "bf16/bf16/fp32")
        kinds = ("optional_parameter", "optional_unit")
        return Capabilities(
            name="torch_ddp",
            versions={"torch": torch.__version__},
            strategies=("fsdp2",),
            actions=tuple(kind for kind in ACTIONS if kind not in _LEFT_OUT),
            lacks=(
                *({"mesh": mesh} for mesh in others),
                *({"dtypes": dtypes} for dtypes in mixed),
                *({"kind": kind} for kind in kinds),
                {"sync": "eager"},
            ),
            without=("adapter",),
        )

    def supports(self, case: Case) -> str | None:
        if case.mesh.ndim == 1 or case.mesh.shards > 1:
            return "DDP does not shard: it has meshes of replicas alone"
        if case.mesh.replicas & (case.mesh.replicas - 1):
            return "DDP multiplies by the reciprocal of the replicas: judged where that is exact"
        if case.dtypes.mixed:
            return "DDP casts nothing"
        if not case.engine.deferred:
            return "DDP averages the sum so far at every micro-batch: judged with one reduction"
        if case.model.optional != "none":
            return "DDP waits for every parameter's gradient"
        return refusal("fsdp2", case)

    def numerics(self, case: Case) -> Numerics:
        """One sum over the replicas, divided before, of all parameters; torch's norm."""
        size = case.mesh.replicas
        level = Level(axis="replicate", size=size, before=float(size))
        whole = Unit(name="", parameters=parameter_names(case.model))
        return dataclasses.replace(
            fsdp1_numerics(case), levels=(level,), units=(whole,), semantics=""
        )

    def build(self, case: Case, rank: RankContext) -> DdpTrainee:
        device = torch.device(rank.device)
        trainee = DdpTrainee(build_model(case).to(device), case, device)
        trainee.replica = DistributedDataParallel(trainee.module)
        return trainee


class DdpTrainee(PlainTrainee):
    """A module that is whole on every rank, run as a `replica` that is averaged with the others."""

    replica: DistributedDataParallel

    def forward(self, inputs: dict[str, Tensor]) -> object:
        return self.replica(**module_arguments(self.case, inputs))

    def gradient_sync(self, *, enabled: bool) -> AbstractContextManager[None]:
        return nullcontext() if enabled else cast(Any, self.replica.no_sync())

    def clip(self, max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)

    def export(self, action: Export) -> Iterator[tuple[str, Tensor]]:  # noqa: ARG002  nothing to stage
        return full_copies(self.module.state_dict(), self.device)

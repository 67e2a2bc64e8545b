"""Hugging Face accelerate's FSDP1 and FSDP2 as an engine.

Judged is what accelerate adds to torch: which modules it wraps and how, `no_sync`, `backward`,
`clip_grad_norm_`, its optimizer and scheduler, the exchange of the optimizer's parameters under
FSDP2, `save_state` and `load_state`. The loop around it is plain (`plain_loop`); weights are
exported by torch, for `get_state_dict` has them on the first rank only.

On the host accelerate does not turn FSDP on: with a `fsdp_plugin` given it wraps in
`DistributedDataParallel` and says nothing (`docs/findings/accelerate.md`). Here it is told that its
processes are those of accelerators before it looks, and that FSDP wrapped the model is checked.
Checked with accelerate 1.15.
"""

from __future__ import annotations

import dataclasses
import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import accelerate
import torch
from accelerate import Accelerator, DataLoaderConfiguration, FullyShardedDataParallelPlugin
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, ProjectConfiguration
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from fsdp_engine.adapters.numerics import fsdp1_numerics, fsdp2_numerics
from fsdp_engine.adapters.plain_loop import PlainEngine, optimizer_of, schedule_of
from fsdp_engine.adapters.torch_fsdp import (
    STRATEGIES,
    Fsdp1Trainee,
    Fsdp2Trainee,
    fsdp1_policy,
    fsdp2_policy,
    refusal,
)
from fsdp_engine.contract.actions import ACTIONS, OFFLOAD_ACTIONS
from fsdp_engine.contract.case import Case
from fsdp_engine.contract.errors import EngineStateError
from fsdp_engine.contract.observation import Numerics, Unit
from fsdp_engine.contract.protocol import Capabilities, RankContext
from fsdp_engine.workload.models import build_model, unit_names

_VERSIONS = {"fsdp1": 1, "fsdp2": 2}


class Accelerate(PlainEngine):
    """`Accelerator.prepare` over a `FullyShardedDataParallelPlugin` of either version."""

    def capabilities(self) -> Capabilities:
        return Capabilities(
            name="accelerate",
            versions={"accelerate": accelerate.__version__, "torch": torch.__version__},
            strategies=tuple(_VERSIONS),
            # A damaged checkpoint need not be refused: accelerate does not promise to look.
            actions=tuple(kind for kind in ACTIONS if kind not in ("reject", *OFFLOAD_ACTIONS)),
            without=("adapter", "reshard"),
            lacks=(
                {"strategy": "fsdp1", "mesh": "grid"},
                {"strategy": "fsdp1", "mesh": "single", "sync": "deferred"},
                {"mesh": "column"},
                {"mesh": "row"},
            ),
        )

    def supports(self, case: Case) -> str | None:
        strategy, mesh = case.engine.strategy, case.mesh
        if mesh.ndim == 2 and strategy == "fsdp1":
            return "accelerate hands FSDP1 no mesh: it shards over all ranks"
        if mesh.ndim == 2 and 1 in mesh.shape:
            return "ParallelismConfig takes an extent of one as an axis that is not there"
        if mesh.world_size == 1 and strategy == "fsdp1" and case.engine.deferred:
            return "accelerate's no_sync does nothing to FSDP1 in one process"
        return refusal(strategy, case)

    def numerics(self, case: Case) -> Numerics:
        if case.engine.strategy == "fsdp1":
            return fsdp1_numerics(case)
        numerics = fsdp2_numerics(case)
        if not case.model.is_language:
            return numerics
        return dataclasses.replace(numerics, units=_regrouped(case, numerics.units), semantics="")

    def build(self, case: Case, rank: RankContext) -> AccelerateFsdp1 | AccelerateFsdp2:
        model = build_model(case)
        accelerator = _accelerator(case, rank, model)
        optimizer = optimizer_of(model, case.optimizer)
        schedule = schedule_of(optimizer, case.optimizer)
        module: Any
        module, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
        one = case.engine.strategy == "fsdp1"
        wrapper = FullyShardedDataParallel if one else FSDPModule
        if not isinstance(module, wrapper):
            raise EngineStateError(f"accelerate made a {type(module).__name__}, no {wrapper}")
        trainee = (AccelerateFsdp1 if one else AccelerateFsdp2)(
            cast(Any, module),
            case,
            torch.device(rank.device),
            optimizer=optimizer,
            schedule=schedule,
        )
        trainee.accelerator = accelerator
        return trainee


class _Accelerated:
    """What goes through the accelerator, whichever FSDP is below."""

    accelerator: Accelerator
    module: Any

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)

    def gradient_sync(self, *, enabled: bool) -> AbstractContextManager[None]:
        return nullcontext() if enabled else self.accelerator.no_sync(self.module)

    def clip(self, max_norm: float) -> Tensor:
        norm = self.accelerator.clip_grad_norm_(self.module.parameters(), max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else cast(Tensor, norm)

    def save(self, path: str, *, max_to_keep: int | None = None) -> None:
        """The accelerator numbers the checkpoints and removes the oldest itself."""
        project = self.accelerator.project_configuration
        project.set_directories(path)
        project.total_limit = max_to_keep
        self.accelerator.save_state()

    def load(self, path: str) -> None:
        saved = Path(path, "checkpoints").glob("checkpoint_*")
        newest = max(saved, key=lambda folder: int(folder.name.rpartition("_")[2]))
        self.accelerator.load_state(str(newest))
        self.accelerator.project_configuration.iteration = int(newest.name.rpartition("_")[2]) + 1


class AccelerateFsdp1(_Accelerated, Fsdp1Trainee):
    """A module that accelerate wrapped by FSDP1."""


class AccelerateFsdp2(_Accelerated, Fsdp2Trainee):
    """A module that accelerate sharded by FSDP2."""


def _accelerator(case: Case, rank: RankContext, model: nn.Module) -> Accelerator:
    """A new accelerator over the case's process group: its state is a process's only one."""
    AcceleratorState._reset_state(reset_partial_state=True)  # noqa: SLF001  no public way
    GradientState._reset_state()  # noqa: SLF001
    os.environ |= {
        "RANK": str(rank.rank),
        "LOCAL_RANK": str(rank.rank),
        "WORLD_SIZE": str(rank.world_size),
        "LOCAL_WORLD_SIZE": str(rank.world_size),
        "ACCELERATE_TORCH_DEVICE": rank.device,  # FSDP1 takes "cpu" for no "cpu:0"
    }
    state = PartialState(cpu=True)
    state.distributed_type = DistributedType.MULTI_GPU  # of these alone FSDP may become the type
    return Accelerator(
        cpu=True,
        fsdp_plugin=_plugin(case, model),
        parallelism_config=_parallelism(case),
        dataloader_config=DataLoaderConfiguration(split_batches=True),  # the schedule's step is 1
        project_config=ProjectConfiguration(automatic_checkpoint_naming=True),
    )


def _plugin(case: Case, model: nn.Module) -> FullyShardedDataParallelPlugin:
    classes = {type(model.get_submodule(name)).__name__ for name in unit_names(case)}
    options: dict[str, Any] = {
        "fsdp_version": _VERSIONS[case.engine.strategy],
        "auto_wrap_policy": "transformer_based_wrap",
        "transformer_cls_names_to_wrap": sorted(classes),
        "state_dict_type": "SHARDED_STATE_DICT",
    }
    if case.engine.strategy == "fsdp1":
        options |= {
            "sharding_strategy": STRATEGIES[1, case.engine.reshard_after_forward],
            "mixed_precision_policy": fsdp1_policy(case.dtypes),
            "backward_prefetch": "BACKWARD_PRE",  # torch's default; accelerate's is none
            "use_orig_params": True,
        }
    else:
        options |= {
            "reshard_after_forward": case.engine.reshard_after_forward,
            "mixed_precision_policy": fsdp2_policy(case.dtypes),
        }
    return FullyShardedDataParallelPlugin(**options)


def _parallelism(case: Case) -> ParallelismConfig | None:
    if case.mesh.ndim == 1:
        return None
    return ParallelismConfig(dp_replicate_size=case.mesh.replicas, dp_shard_size=case.mesh.shards)


def _regrouped(case: Case, units: tuple[Unit, ...]) -> tuple[Unit, ...]:
    """FSDP2 on a language model: the embedding and the end of the model are units of their own.

    `fsdp2_prepare_model`: the embedding is one, the last norm and the head another; of a tied pair
    the embedding is with the head. The root is left with what an adapter hides from that search.
    """
    root, *blocks = units
    parts: dict[str, list[str]] = {"": [], "embedding": [], "end": []}
    for name in root.parameters:
        parts[_part_of(name, case)].append(name)
    own = [Unit(name=part, parameters=tuple(names)) for part, names in parts.items()]
    return (own[0], *blocks, *(unit for unit in own[1:] if unit.parameters))


def _part_of(name: str, case: Case) -> str:
    if "embed_tokens" in name and not case.model.tied:
        return "embedding"
    if "norm" in name and case.model.lora_rank:
        return ""  # looked for below the adapter's wrapper, where it is not
    return "end"

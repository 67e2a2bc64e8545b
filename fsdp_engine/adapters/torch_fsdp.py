"""Plain torch FSDP1 and FSDP2 as engines: the example to copy for an adapter of your own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

from fsdp_engine.adapters.numerics import fsdp1_numerics, fsdp2_numerics
from fsdp_engine.adapters.plain_loop import PlainEngine, PlainTrainee, ranks_run_the_same
from fsdp_engine.contract.actions import (
    ACTIONS,
    CHECKPOINT_ACTIONS,
    OFFLOAD_ACTIONS,
    Export,
)
from fsdp_engine.contract.case import Case, DtypePolicy
from fsdp_engine.contract.observation import Numerics
from fsdp_engine.contract.protocol import Capabilities, Losses, RankContext, TokenLoss
from fsdp_engine.torch_private.shards import plain_name
from fsdp_engine.torch_private.strategies import HYBRID_SHARD_ZERO2
from fsdp_engine.workload.batches import LocalBatch
from fsdp_engine.workload.models import TORCH_DTYPES, build_model, unit_names

STRATEGIES: dict[tuple[int, bool], ShardingStrategy] = {
    (1, True): ShardingStrategy.FULL_SHARD,
    (1, False): ShardingStrategy.SHARD_GRAD_OP,
    (2, True): ShardingStrategy.HYBRID_SHARD,
    (2, False): HYBRID_SHARD_ZERO2,
}
"""FSDP1's sharding strategy by `(dimensions of the mesh, reshard after forward)`."""


class TorchFsdp1(PlainEngine):
    """`FullyShardedDataParallel`, one instance per unit and one for the root."""

    def capabilities(self) -> Capabilities:
        return _capabilities("torch_fsdp1", "fsdp1")

    def supports(self, case: Case) -> str | None:
        return refusal("fsdp1", case)

    def numerics(self, case: Case) -> Numerics:
        return fsdp1_numerics(case)

    def strategy(self, mesh_ndim: int, *, zero3: bool) -> str:
        if (mesh_ndim, zero3) not in STRATEGIES:
            raise NotImplementedError(f"mesh ndim {mesh_ndim}: FSDP1 has strategies for 1 and 2")
        return STRATEGIES[mesh_ndim, zero3].name

    def build(self, case: Case, rank: RankContext) -> Fsdp1Trainee:
        model = build_model(case)
        classes = {type(model.get_submodule(name)) for name in unit_names(case)}
        module = FullyShardedDataParallel(
            model,
            device_mesh=_device_mesh(case, rank),
            sharding_strategy=STRATEGIES[case.mesh.ndim, case.engine.reshard_after_forward],
            auto_wrap_policy=ModuleWrapPolicy(classes),
            mixed_precision=fsdp1_policy(case.dtypes),
            device_id=torch.device(rank.device),
            use_orig_params=True,
        )
        return Fsdp1Trainee(module, case, torch.device(rank.device))


class TorchFsdp2(PlainEngine):
    """`fully_shard` on every unit, then on the root."""

    def capabilities(self) -> Capabilities:
        return _capabilities("torch_fsdp2", "fsdp2")

    def supports(self, case: Case) -> str | None:
        return refusal("fsdp2", case, has_policy=True)

    def numerics(self, case: Case) -> Numerics:
        return fsdp2_numerics(case)

    def strategy(self, mesh_ndim: int, *, zero3: bool) -> str:
        if mesh_ndim not in (1, 2):
            raise NotImplementedError(f"mesh ndim {mesh_ndim}: fully_shard takes 1 or 2")
        return STRATEGIES[mesh_ndim, zero3].name

    def build(self, case: Case, rank: RankContext) -> Fsdp2Trainee:
        model = build_model(case)
        options: dict[str, Any] = {"mesh": _device_mesh(case, rank)}
        if case.engine.offload_policy:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=rank.device != "cpu")
        shard_units(model, case, **options)
        return Fsdp2Trainee(model, case, torch.device(rank.device))


def shard_units(model: nn.Module, case: Case, **options: Any) -> None:
    """`fully_shard` on every unit of the case, then on the root; `options` go to all."""
    options["mp_policy"] = fsdp2_policy(case.dtypes)
    reshard = case.engine.reshard_after_forward
    for name in unit_names(case):
        fully_shard(model.get_submodule(name), reshard_after_forward=reshard, **options)
    # None: the root's backward follows its forward at once, so torch keeps it gathered.
    fully_shard(model, reshard_after_forward=None if reshard else False, **options)


class Fsdp1Trainee(PlainTrainee):
    """A module wrapped by FSDP1."""

    module: FullyShardedDataParallel

    def gradient_sync(self, *, enabled: bool) -> AbstractContextManager[None]:
        return nullcontext() if enabled else cast(Any, self.module.no_sync())

    def clip(self, max_norm: float) -> Tensor:
        return self.module.clip_grad_norm_(max_norm)

    def export(self, action: Export) -> Iterator[tuple[str, Tensor]]:  # noqa: ARG002  nothing to stage
        config = FullStateDictConfig(offload_to_cpu=False, rank0_only=False)
        with FullyShardedDataParallel.state_dict_type(
            self.module, StateDictType.FULL_STATE_DICT, config
        ):
            return full_copies(self.module.state_dict(), self.device)


class Fsdp2Trainee(PlainTrainee):
    """A module sharded in place by FSDP2."""

    def forward_backward(self, batch: LocalBatch, loss: TokenLoss) -> Losses:
        try:
            return super().forward_backward(batch, loss)
        except BaseException:
            cast(FSDPModule, self.module).reset_iter_state()  # what torch says to do
            raise

    def gradient_sync(self, *, enabled: bool) -> AbstractContextManager[None]:
        cast(FSDPModule, self.module).set_requires_gradient_sync(enabled)
        return nullcontext()

    def clip(self, max_norm: float) -> Tensor:
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def export(self, action: Export) -> Iterator[tuple[str, Tensor]]:  # noqa: ARG002  nothing to stage
        return full_copies(self.module.state_dict(), self.device)


def full_copies(state: dict[str, Tensor], device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """All of it at once: what a state dict holds is the weights themselves, which a step moves.

    On the device: one rank alone has nothing to gather, so what rests on the host is full there.
    """
    return iter(
        [
            (
                plain_name(name),
                (t.full_tensor() if isinstance(t, DTensor) else t).to(device, copy=True),
            )
            for name, t in state.items()
        ]
    )


def _capabilities(name: str, strategy: str) -> Capabilities:
    return Capabilities(
        name=name,
        versions={"torch": torch.__version__},
        strategies=(strategy,),
        actions=tuple(kind for kind in ACTIONS if kind not in CHECKPOINT_ACTIONS + OFFLOAD_ACTIONS),
        without=("adapter",),
    )


def refusal(strategy: str, case: Case, *, has_policy: bool = False) -> str | None:
    """What a plain training loop around torch's wrapper cannot do, in words.

    `has_policy`: FSDP2's offload policy is handed on.
    """
    engine = case.engine
    if engine.strategy != strategy:
        return f"this engine is {strategy}, the case asks for {engine.strategy}"
    if engine.config_source != "dataclass" or engine.overrides:
        return "plain torch has no configuration file, legacy object or fields to override"
    if engine.param_offload or engine.optimizer_offload:
        return "a plain loop moves nothing between batches"
    if engine.offload_policy and not has_policy:
        return "the engine hands on no offload policy"
    if case.model.optional == "unit" and not ranks_run_the_same(case):
        return (
            "some ranks run the optional unit in a micro-batch in which others do not: a forward "
            "gathers, so a unit is run on all ranks or on none"
        )
    return None


def _device_mesh(case: Case, rank: RankContext) -> DeviceMesh:
    axes = ("shard",) if case.mesh.ndim == 1 else ("replicate", "shard")
    return init_device_mesh(torch.device(rank.device).type, case.mesh.shape, mesh_dim_names=axes)


def fsdp1_policy(policy: DtypePolicy) -> MixedPrecision | None:
    """The case's policy in FSDP1's words; None where nothing is cast."""
    if not policy.mixed:
        return None
    return MixedPrecision(
        param_dtype=TORCH_DTYPES[policy.compute],
        reduce_dtype=TORCH_DTYPES[policy.reduce],
        buffer_dtype=None,
        cast_forward_inputs=True,
        cast_root_forward_inputs=True,
    )


def fsdp2_policy(policy: DtypePolicy) -> MixedPrecisionPolicy:
    """The case's policy in FSDP2's words."""
    if not policy.mixed:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(
        param_dtype=TORCH_DTYPES[policy.compute],
        reduce_dtype=TORCH_DTYPES[policy.reduce],
        cast_forward_inputs=True,
    )

"""Plain torch FSDP1 and FSDP2 as engines: the example to copy for an adapter of your own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
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
from fsdp_engine.adapters.plain_loop import count_loss, normalised_loss, plan_micro_batches
from fsdp_engine.contract.case import Case, DtypePolicy, Export, Scalar
from fsdp_engine.contract.observation import Numerics
from fsdp_engine.contract.protocol import (
    Capabilities,
    LocalShard,
    Losses,
    RankContext,
    StepResult,
    TokenLoss,
)
from fsdp_engine.torch_private.shards import gradient_shards, parameter_shards, plain_name
from fsdp_engine.workload.batches import LocalBatch
from fsdp_engine.workload.models import TORCH_DTYPES, build_model, module_arguments, unit_names

STRATEGIES: dict[tuple[int, bool], ShardingStrategy] = {
    (1, True): ShardingStrategy.FULL_SHARD,
    (1, False): ShardingStrategy.SHARD_GRAD_OP,
    (2, True): ShardingStrategy.HYBRID_SHARD,
    (2, False): ShardingStrategy._HYBRID_SHARD_ZERO2,  # noqa: SLF001  torch has no public name
}
"""FSDP1's sharding strategy by `(dimensions of the mesh, reshard after forward)`."""


class TorchFsdp1:
    """`FullyShardedDataParallel`, one instance per unit and one for the root."""

    def capabilities(self) -> Capabilities:
        return _capabilities("torch_fsdp1", "fsdp1")

    def supports(self, case: Case) -> str | None:
        if case.engine.deferred and case.model.optional != "none":
            return (
                "FSDP1 asserts in no_sync where a unit is used in an earlier micro-batch and not "
                "in the last one (torch defect, `_saved_grad_shard`)"
            )
        if case.mesh.ndim == 2 and case.mesh.shards == 1:
            return (
                f"FSDP1 on a {case.mesh.shape} mesh falls back to NO_SHARD over the shard axis and "
                "never averages over the replicas (torch defect)"
            )
        return _refusal("fsdp1", case)

    def numerics(self, case: Case) -> Numerics:
        return fsdp1_numerics(case)

    def defaults(self) -> dict[str, dict[str, Scalar]]:
        return {}

    def mesh_shape(self, world_size: int, fsdp_size: int) -> tuple[int, ...]:
        return _mesh_shape(world_size, fsdp_size)

    def strategy(self, mesh_ndim: int, *, zero3: bool) -> str:
        if (mesh_ndim, zero3) not in STRATEGIES:
            raise NotImplementedError(f"mesh ndim {mesh_ndim}: FSDP1 has strategies for 1 and 2")
        return STRATEGIES[mesh_ndim, zero3].name

    def build(self, case: Case, rank: RankContext) -> Fsdp1Trainee:
        model = build_model(case)
        classes = {type(model.get_submodule(name)) for name in unit_names(case)}
        policy = case.dtypes
        precision = MixedPrecision(
            param_dtype=TORCH_DTYPES[policy.compute],
            reduce_dtype=TORCH_DTYPES[policy.reduce],
            buffer_dtype=None,
            cast_forward_inputs=True,
            cast_root_forward_inputs=True,
        )
        module = FullyShardedDataParallel(
            model,
            device_mesh=_device_mesh(case, rank),
            sharding_strategy=STRATEGIES[case.mesh.ndim, case.engine.reshard_after_forward],
            auto_wrap_policy=ModuleWrapPolicy(classes),
            mixed_precision=precision if policy.mixed else None,
            device_id=torch.device(rank.device),
            use_orig_params=True,
        )
        return Fsdp1Trainee(module, case)


class TorchFsdp2:
    """`fully_shard` on every unit, then on the root."""

    def capabilities(self) -> Capabilities:
        return _capabilities("torch_fsdp2", "fsdp2")

    def supports(self, case: Case) -> str | None:
        deferred_mixed = case.engine.deferred and case.dtypes.compute != case.dtypes.reduce
        if deferred_mixed and case.model.optional != "none":
            return (
                "FSDP2 asserts under deferred sync with a reduce dtype of its own where a parameter"
                " is first used in the last micro-batch (torch defect, uniform gradient dtype)"
            )
        return _refusal("fsdp2", case)

    def numerics(self, case: Case) -> Numerics:
        return fsdp2_numerics(case)

    def defaults(self) -> dict[str, dict[str, Scalar]]:
        return {}

    def mesh_shape(self, world_size: int, fsdp_size: int) -> tuple[int, ...]:
        return _mesh_shape(world_size, fsdp_size)

    def strategy(self, mesh_ndim: int, *, zero3: bool) -> str:
        if mesh_ndim not in (1, 2):
            raise NotImplementedError(f"mesh ndim {mesh_ndim}: fully_shard takes 1 or 2")
        return STRATEGIES[mesh_ndim, zero3].name

    def build(self, case: Case, rank: RankContext) -> Fsdp2Trainee:
        model = build_model(case)
        options: dict[str, Any] = {
            "mesh": _device_mesh(case, rank),
            "reshard_after_forward": case.engine.reshard_after_forward,
            "mp_policy": _fsdp2_policy(case.dtypes),
        }
        for name in unit_names(case):
            fully_shard(model.get_submodule(name), **options)
        # None: the root's backward follows its forward at once, so torch keeps it gathered.
        options["reshard_after_forward"] = None if case.engine.reshard_after_forward else False
        fully_shard(model, **options)
        return Fsdp2Trainee(model, case)


class _Trainee:
    """What both wrappers share: the training loop, the optimizer, the batch's arithmetic."""

    def __init__(self, module: nn.Module, case: Case) -> None:
        self.module = module
        self.case = case
        options = case.optimizer
        trainable = [p for p in module.parameters() if p.requires_grad]
        kind = torch.optim.SGD if options.kind == "sgd" else torch.optim.AdamW
        self.optimizer = kind(trainable, lr=options.lr, weight_decay=options.weight_decay)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, step / max(1, options.warmup_steps))
        )

    @contextmanager
    def mode(self, which: Literal["train", "eval"]) -> Iterator[None]:
        before = self.module.training
        self.module.train(which == "train")
        try:
            yield
        finally:
            self.module.train(before)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def forward_backward(self, batch: LocalBatch, loss: TokenLoss) -> Losses:
        counts = count_loss(batch)
        plan = plan_micro_batches(batch, self.case.engine.planning)
        total = 0.0
        for number, indices in enumerate(plan):
            micro_batch = batch.select(indices)
            synced = not self.case.engine.deferred or number == len(plan) - 1
            with self.gradient_sync(enabled=synced):
                output = self.module(**module_arguments(self.case, micro_batch.inputs))
                token_losses = loss(output, micro_batch)
                scaled = normalised_loss(
                    token_losses, micro_batch.loss_mask, self.case.engine.loss_mode, counts
                )
                scaled.backward()  # type: ignore[no-untyped-call]  # so in torch
            total += scaled.item()
        return Losses(total=total, plan=plan)

    def gradient_sync(self, *, enabled: bool) -> AbstractContextManager[None]:
        raise NotImplementedError

    def clip(self, max_norm: float) -> Tensor:
        raise NotImplementedError

    def gradients(self) -> Iterator[LocalShard]:
        return gradient_shards(self.module)

    def parameters(self) -> Iterator[LocalShard]:
        return parameter_shards(self.module)

    def step(self) -> StepResult:
        norm = self.clip(self.case.optimizer.clip_grad).item()
        finite = math.isfinite(norm)
        if finite:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return StepResult(norm=norm, stepped=finite)

    def lr_step(self) -> float:
        self.schedule.step()
        return float(self.schedule.get_last_lr()[0])

    @torch.no_grad()
    def infer(self, batch: LocalBatch, loss: TokenLoss) -> Tensor:
        everything = batch.select(range(len(batch)))
        return loss(self.module(**module_arguments(self.case, everything.inputs)), everything)


class Fsdp1Trainee(_Trainee):
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
            state = self.module.state_dict()
        for name, tensor in state.items():
            yield plain_name(name), tensor


class Fsdp2Trainee(_Trainee):
    """A module sharded in place by FSDP2."""

    def gradient_sync(self, *, enabled: bool) -> AbstractContextManager[None]:
        cast(FSDPModule, self.module).set_requires_gradient_sync(enabled)
        return nullcontext()

    def clip(self, max_norm: float) -> Tensor:
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def export(self, action: Export) -> Iterator[tuple[str, Tensor]]:  # noqa: ARG002  nothing to stage
        for name, tensor in self.module.state_dict().items():
            yield plain_name(name), tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _capabilities(name: str, strategy: str) -> Capabilities:
    return Capabilities(
        name=name,
        versions={"torch": torch.__version__},
        strategies=(strategy,),
        actions=("train", "infer", "export"),
    )


def _refusal(strategy: str, case: Case) -> str | None:
    engine = case.engine
    if engine.strategy != strategy:
        return f"this engine is {strategy}, the case asks for {engine.strategy}"
    if engine.config_source != "dataclass" or engine.overrides:
        return "plain torch has no configuration file, legacy object or fields to override"
    return None


def _mesh_shape(world_size: int, fsdp_size: int) -> tuple[int, ...]:
    raise NotImplementedError(f"plain torch takes a mesh as it is, not {world_size}, {fsdp_size}")


def _device_mesh(case: Case, rank: RankContext) -> DeviceMesh:
    axes = ("shard",) if case.mesh.ndim == 1 else ("replicate", "shard")
    return init_device_mesh(rank.device, case.mesh.shape, mesh_dim_names=axes)


def _fsdp2_policy(policy: DtypePolicy) -> MixedPrecisionPolicy:
    if not policy.mixed:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(
        param_dtype=TORCH_DTYPES[policy.compute],
        reduce_dtype=TORCH_DTYPES[policy.reduce],
        cast_forward_inputs=True,
    )

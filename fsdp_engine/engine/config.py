"""The engine's configuration: frozen, validated when built, with the field names of verl's engine.

Every accepted field changes something that can be observed. A field that changes nothing under
the chosen strategy, planning or schedule is refused when it is set to something else than its
default, never ignored.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias

import torch

from fsdp_engine.contract.case import LossMode, literal_values
from fsdp_engine.contract.errors import ConfigError

ShardingLibrary: TypeAlias = Literal["fsdp", "fsdp2"]
Schedule: TypeAlias = Literal["constant", "cosine"]
OptimizerName: TypeAlias = Literal["AdamW", "SGD"]

DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}
"""Names of dtypes to torch's. fp16 is not among them: it needs loss scaling, which is not here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedPrecision:
    """Dtypes of forward and backward, of the gradient reduction and of buffers.

    None keeps what there is: the storage dtype for `param_dtype`, the dtype of the gradients for
    `reduce_dtype`, each buffer's own for `buffer_dtype` (FSDP1 only: `fully_shard` leaves buffers
    alone).
    """

    param_dtype: str | None = None
    reduce_dtype: str | None = None
    buffer_dtype: str | None = None

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
            _require_dtype(f"mixed_precision.{name}", getattr(self, name), optional=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class WrapPolicy:
    """Which modules become units of their own, by class name or by size.

    Neither: the classes that the model itself names in `_no_split_modules`. `min_num_params` 0 is
    off.
    """

    transformer_layer_cls_to_wrap: tuple[str, ...] | None = None
    min_num_params: int = 0

    def __post_init__(self) -> None:
        names: Any = self.transformer_layer_cls_to_wrap
        legal = names is None or (
            isinstance(names, tuple) and names and all(isinstance(n, str) and n for n in names)
        )
        _require(legal, "wrap_policy.transformer_layer_cls_to_wrap", names, "None or class names")
        _require_int("wrap_policy.min_num_params", self.min_num_params, low=0)
        if self.min_num_params:
            _require(
                names is None,
                "wrap_policy.transformer_layer_cls_to_wrap",
                names,
                "None where min_num_params decides",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How the module is sharded, synchronised and fed.

    `fsdp_size`: see `mesh.mesh_shape`. `reshard_after_forward`: ZeRO-3, otherwise ZeRO-2.
    `use_no_sync_for_gradient_accumulation`: reduce gradients only at the last micro-batch; it
    saves communication and keeps the whole model's unsharded gradients on every rank.
    `use_orig_params`: FSDP1 only, and only True is legal. With one flat gradient for a whole unit,
    a parameter that was not used could not be left out of the optimizer step, and frozen
    parameters could not share a unit with trainable ones.
    `micro_batch_size_per_gpu` counts sequences and plans static micro-batches,
    `max_token_len_per_gpu` counts tokens without padding and plans dynamic ones. Every
    `force_group_size` consecutive sequences of a rank's batch share a micro-batch.
    `param_offload`: between batches parameters, their gradients and buffers rest on the host;
    `optimizer_offload`: so does the optimizer's state between steps. `offload_policy`: FSDP2 keeps
    all of them but the buffers on the host and steps there. Where the host is the device these
    change nothing.
    """

    strategy: ShardingLibrary = "fsdp"
    fsdp_size: int = -1
    reshard_after_forward: bool = True
    use_no_sync_for_gradient_accumulation: bool = False
    use_orig_params: bool = True
    forward_prefetch: bool = False
    model_dtype: str = "fp32"
    mixed_precision: MixedPrecision = field(default_factory=MixedPrecision)
    wrap_policy: WrapPolicy = field(default_factory=WrapPolicy)
    use_dynamic_bsz: bool = False
    micro_batch_size_per_gpu: int = 1
    max_token_len_per_gpu: int | None = None
    force_group_size: int = 1
    loss_agg_mode: LossMode = "token-mean"
    forward_only: bool = False
    param_offload: bool = False
    optimizer_offload: bool = False
    offload_policy: bool = False

    def __post_init__(self) -> None:
        _require_one_of("strategy", self.strategy, literal_values(ShardingLibrary))
        _require_int("fsdp_size", self.fsdp_size)
        _require(self.fsdp_size != 0, "fsdp_size", 0, "a divisor of the world size, or negative")
        for name in (
            "reshard_after_forward",
            "use_no_sync_for_gradient_accumulation",
            "use_orig_params",
            "forward_prefetch",
            "use_dynamic_bsz",
            "forward_only",
            "param_offload",
            "optimizer_offload",
            "offload_policy",
        ):
            value = getattr(self, name)
            _require(isinstance(value, bool), name, value, "True or False")
        _require_dtype("model_dtype", self.model_dtype)
        _require_one_of("loss_agg_mode", self.loss_agg_mode, literal_values(LossMode))
        self._require_planning()
        self._require_nothing_inert()

    def _require_planning(self) -> None:
        _require_int("micro_batch_size_per_gpu", self.micro_batch_size_per_gpu, low=1)
        _require_int("force_group_size", self.force_group_size, low=1)
        tokens = self.max_token_len_per_gpu
        if self.use_dynamic_bsz:
            _require_int("max_token_len_per_gpu", tokens, low=1)
            _require(
                self.micro_batch_size_per_gpu == 1,
                "micro_batch_size_per_gpu",
                self.micro_batch_size_per_gpu,
                "1, the default, where use_dynamic_bsz plans by tokens",
            )
        else:
            _require(
                tokens is None,
                "max_token_len_per_gpu",
                tokens,
                "None without use_dynamic_bsz, which alone plans by tokens",
            )
            _require(
                self.force_group_size == 1,
                "force_group_size",
                self.force_group_size,
                "1 without use_dynamic_bsz: static micro-batches keep the order anyway",
            )

    def _require_nothing_inert(self) -> None:
        reason = (
            "True: under fsdp one flat gradient per unit has no absent parts; fsdp2 has no flat "
            "parameters"
        )
        _require(self.use_orig_params, "use_orig_params", self.use_orig_params, reason)
        _require(
            self.strategy == "fsdp" or self.mixed_precision.buffer_dtype is None,
            "mixed_precision.buffer_dtype",
            self.mixed_precision.buffer_dtype,
            "None under fsdp2, which leaves buffers alone",
        )
        _require(
            not (self.forward_only and self.use_no_sync_for_gradient_accumulation),
            "use_no_sync_for_gradient_accumulation",
            self.use_no_sync_for_gradient_accumulation,
            "False with forward_only, which has no gradients",
        )
        _require(
            not (self.forward_only and self.optimizer_offload),
            "optimizer_offload",
            self.optimizer_offload,
            "False with forward_only, which has no optimizer",
        )
        _require(
            not (self.offload_policy and self.strategy == "fsdp"),
            "offload_policy",
            self.offload_policy,
            "False under fsdp; param_offload and optimizer_offload are for both strategies",
        )
        for name in ("param_offload", "optimizer_offload"):
            value = getattr(self, name)
            _require(
                not (value and self.offload_policy),
                name,
                value,
                "False with offload_policy, which keeps everything on the host",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """Optimizer, clipping and schedule.

    `lr_warmup_steps` < 0: `lr_warmup_steps_ratio` of `total_training_steps`. `betas` belong to
    AdamW; `min_lr_ratio` and `num_cycles` to the cosine schedule.
    """

    optimizer: OptimizerName = "AdamW"
    lr: float = 1e-3
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    clip_grad: float = 1.0
    lr_scheduler_type: Schedule = "constant"
    lr_warmup_steps: int = -1
    lr_warmup_steps_ratio: float = 0.0
    total_training_steps: int = -1
    min_lr_ratio: float = 0.0
    num_cycles: float = 0.5

    def __post_init__(self) -> None:
        _require_one_of("optimizer", self.optimizer, literal_values(OptimizerName))
        _require_number("lr", self.lr, low=0.0)
        _require_number("weight_decay", self.weight_decay, low=0.0)
        betas: Any = self.betas
        legal = isinstance(betas, tuple) and len(betas) == 2
        _require(legal, "betas", self.betas, "two numbers")
        for beta in self.betas:
            _require_number("betas", beta, low=0.0, below=1.0)
        clip: Any = self.clip_grad
        legal = isinstance(clip, (int, float)) and not isinstance(clip, bool) and clip > 0
        _require(legal, "clip_grad", clip, "a number above 0; infinity is no clipping")
        self._require_schedule()

    def _require_schedule(self) -> None:
        _require_one_of("lr_scheduler_type", self.lr_scheduler_type, literal_values(Schedule))
        _require_int("lr_warmup_steps", self.lr_warmup_steps)
        _require_number("lr_warmup_steps_ratio", self.lr_warmup_steps_ratio, low=0.0, high=1.0)
        _require_int("total_training_steps", self.total_training_steps)
        _require_number("min_lr_ratio", self.min_lr_ratio, low=0.0, high=1.0)
        _require_number("num_cycles", self.num_cycles, low=0.0)
        cosine = self.lr_scheduler_type == "cosine"
        by_ratio = self.lr_warmup_steps < 0 and self.lr_warmup_steps_ratio > 0
        if cosine or by_ratio:
            _require_int("total_training_steps", self.total_training_steps, low=1)
        inert = {
            "total_training_steps": cosine or by_ratio,
            "min_lr_ratio": cosine,
            "num_cycles": cosine,
            "lr_warmup_steps_ratio": self.lr_warmup_steps < 0,
            "betas": self.optimizer == "AdamW",
        }
        for name, used in inert.items():
            value, default = getattr(self, name), _default(type(self), name)
            _require(
                used or value == default,
                name,
                value,
                f"{default!r}, the default, where nothing reads it",
            )


def warmup_steps(config: OptimizerConfig) -> int:
    """Steps over which the learning rate rises from zero."""
    if config.lr_warmup_steps >= 0:
        return config.lr_warmup_steps
    return int(config.lr_warmup_steps_ratio * max(config.total_training_steps, 0))


def _default(cls: type, name: str) -> object:
    return next(f.default for f in fields(cls) if f.name == name)


def _require(legal: object, name: str, value: object, wanted: str) -> None:
    if not legal:
        raise ConfigError(f"{name}: {value!r} is not legal; legal is {wanted}")


def _require_one_of(name: str, value: object, legal: Iterable[str]) -> None:
    _require(isinstance(value, str) and value in legal, name, value, " or ".join(legal))


def _require_int(name: str, value: Any, *, low: int | None = None) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    wanted = "a whole number" if low is None else f"a whole number from {low}"
    _require(whole and (low is None or value >= low), name, value, wanted)


def _require_number(
    name: str,
    value: Any,
    *,
    low: float,
    high: float = math.inf,
    below: float = math.inf,
) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    legal = number and math.isfinite(value) and low <= value <= high and value < below
    wanted = f"a finite number from {low}"
    if high < math.inf:
        wanted += f" to {high}"
    if below < math.inf:
        wanted += f" to below {below}"
    _require(legal, name, value, wanted)


def _require_dtype(name: str, value: object, *, optional: bool = False) -> None:
    legal = (optional and value is None) or (isinstance(value, str) and value in DTYPES)
    _require(legal, name, value, ", ".join(DTYPES) + (" or None" if optional else ""))

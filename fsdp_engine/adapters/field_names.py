"""A case in the field names of verl's engine, which the reference engine has as well."""

from __future__ import annotations

import math
from typing import Any

from fsdp_engine.contract.case import Case, Scalar

SYNC = "use_no_sync_for_gradient_accumulation"
STRATEGIES = {"fsdp1": "fsdp", "fsdp2": "fsdp2"}
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float64": "fp64", "float16": "fp16"}

_OPTIMIZERS = {"sgd": "SGD", "adamw": "AdamW"}
_NOT_FINITE = {".nan": math.nan, ".inf": math.inf, "-.inf": -math.inf}


def engine_fields(case: Case) -> dict[str, Any]:
    """What both engines are asked for alike: sizes, planning and precision are each one's own."""
    options = case.engine
    return {
        "strategy": STRATEGIES[options.strategy],
        "reshard_after_forward": options.reshard_after_forward,
        SYNC: options.deferred,
        "param_offload": options.param_offload,
        "optimizer_offload": options.optimizer_offload,
        "offload_policy": options.offload_policy,
        "model_dtype": DTYPES[case.dtypes.storage],
    }


def optimizer_fields(case: Case) -> dict[str, Any]:
    """The case's optimizer; the cosine's own fields only where that is the schedule."""
    options = case.optimizer
    fields: dict[str, Any] = {
        "optimizer": _OPTIMIZERS[options.kind],
        "lr": options.lr,
        "weight_decay": options.weight_decay,
        "clip_grad": options.clip_grad,
        "lr_warmup_steps": options.warmup_steps,
        "lr_scheduler_type": options.schedule,
    }
    if options.schedule == "cosine":
        fields["total_training_steps"] = options.total_steps
        fields["min_lr_ratio"] = options.min_lr_ratio
    return fields


def as_written(value: Scalar) -> Scalar:
    """An override's value; some strings stand for numbers that JSON lacks, as YAML writes them."""
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value

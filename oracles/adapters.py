"""What is exported of a model with an adapter: the base, the adapter, and the two added.

Names of the base are those of the model that the workload builds without an adapter. A merged
weight is W + (alpha / r) B A, of an embedding W + (alpha / r) (B A)^T. The product of r terms and
its scaling are computed in the merge dtype, which is fp32 for weights in half precision and their
own for others; then the product is rounded into their dtype and added. In any order of the r terms
each passes at most r + 1 roundings there, so the running error of `merged_weights` is a bound for
all of them (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., 3.1 and 3.5).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from torch import Tensor

from fsdp_engine.contract.actions import Train
from fsdp_engine.contract.case import Case, Dtype
from fsdp_engine.workload.models import state_names
from oracles.arrays import dtype_name, float64_of
from oracles.rounding import FORMATS, gamma, holds
from oracles.running_error import Bounded, add, exact, multiply, rounded, stored

_WITH_PEFT = "base_model.model."
_ADAPTER_NAMES = (
    ("lora_A.weight", "lora_B.weight", False),
    ("lora_embedding_A", "lora_embedding_B", True),
)
"""Of A and B behind the layer's path in peft's files, and whether B A is transposed."""


def base_case(case: Case) -> Case:
    """The case with the model that the adapter was put on; nothing of it is run."""
    return replace(case, model=case.model.without_adapter, program=(Train(),))


def base_tensors(case: Case, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The base's tensors by its own names, of those of the model with the adapter."""
    return {name: whole[_adapted_name(name, whole)] for name in state_names(base_case(case).model)}


def adapter_tensors(whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A and B of every layer by their names in peft's files, which leave the adapter's own out."""
    return {
        name.replace(".default", ""): tensor for name, tensor in whole.items() if ".lora_" in name
    }


def merged_weights(
    case: Case, base: Mapping[str, Tensor], adapter: Mapping[str, Tensor]
) -> dict[str, Bounded]:
    """The base's weights that have an adapter, with it added; the others stay to the bit.

    Base and adapter by the names they are exported under. Scaled by zero nothing is added.
    """
    scaling = case.model.lora_alpha / case.model.lora_rank
    merged = {}
    for name, weight in base.items():
        path = f"{_WITH_PEFT}{name.removesuffix('.weight')}"
        for a, b, transposed in _ADAPTER_NAMES:
            left, right = adapter.get(f"{path}.{b}"), adapter.get(f"{path}.{a}")
            if scaling and left is not None and right is not None:
                merged[name] = _merged(weight, right, left, scaling, transposed=transposed)
    return merged


def _merged(weight: Tensor, a: Tensor, b: Tensor, scaling: float, *, transposed: bool) -> Bounded:
    storage: Dtype = dtype_name(weight.dtype)  # type: ignore[assignment]  # of a parameter
    wide: Dtype = storage if holds(storage, "float32") else "float32"
    left, right = float64_of(b), float64_of(a)
    rank = len(right)
    size = np.abs(left) @ np.abs(right)
    # By whoever computes it and by the evaluation here, in double.
    relative = gamma(rank, FORMATS[wide].u) + gamma(rank + 1, FORMATS["float64"].u)
    error = size * relative + rank * FORMATS[wide].eta
    product = Bounded(value=left @ right, error=error)
    factor = (
        exact(scaling) if float(np.float32(scaling)) == scaling else rounded(exact(scaling), wide)
    )
    delta = stored(multiply(product, factor, wide), storage, computed=wide)
    if transposed:
        delta = Bounded(value=delta.value.T, error=delta.error.T)
    return add(exact(float64_of(weight)), delta, storage)


def _adapted_name(name: str, whole: Mapping[str, Tensor]) -> str:
    """Where a tensor of the base is in the model with the adapter."""
    path, _, leaf = f"{_WITH_PEFT}{name}".rpartition(".")
    wrapped = f"{path}.base_layer.{leaf}"
    return wrapped if wrapped in whole else f"{path}.{leaf}"

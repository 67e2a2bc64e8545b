"""Operators on the simulated device against the CPU's, of torch's own database, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = "hpu"

LEFT_OUT = ("empty", "jiterator")
"""Families of operators that are not compared: no values yet, CUDA alone."""

OTHER = {
    "to": "the sample asks for the CPU",
    "tensor_split": "indices must be on the CPU, as on a GPU",
    "as_strided": "a sample reads memory that nobody wrote",
    "nn.functional.linear_cross_entropy": "below float32 it adds up otherwise on the CPU alone",
    "linspace": "where it goes is said by an argument alone",
    "logspace": "the same",
    "to_sparse": "sparse tensors have no simulated device",
    "sparse.sampled_addmm": "sparse",
    "sparse.mm": "sparse",
}
"""Operators of torch's database that are not compared, and why."""


def operators_compute_what_the_cpu_does() -> None:
    """Results and gradients."""
    compared = _compare(
        (torch.float32, torch.int64, torch.bool, torch.complex64), samples=3, autocast=False
    )
    assert compared > 1000, compared


def autocast_casts_what_it_casts_on_the_cpu() -> None:
    """Results and gradients again, of operands above and of autocast's dtype."""
    for dtype in (torch.float32, torch.bfloat16):
        compared = _compare((dtype,), samples=1, autocast=True)
        assert compared > 400, (dtype, compared)


def _compare(dtypes: tuple[torch.dtype, ...], *, samples: int, autocast: bool) -> int:
    """Compare each operator in the first of these dtypes that it has; how many calls that were."""
    from torch.testing._internal.common_methods_invocations import op_db

    compared = 0
    for op in op_db:
        if op.name in OTHER or any(word in op.name for word in LEFT_OUT):
            continue
        dtype = next((dtype for dtype in dtypes if dtype in op.dtypes), None)
        if dtype is None:
            continue
        differentiable = dtype.is_floating_point and op.supports_autograd
        info: Any = op
        for sample in islice(
            info.sample_inputs("cpu", dtype, requires_grad=differentiable), samples
        ):
            arguments = (sample.input, sample.args, sample.kwargs)
            if not any(isinstance(value, Tensor) for value in tree_leaves(arguments)):
                continue  # nothing says which device
            there = tree_map(_moved, arguments)
            try:
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                    wanted = _run(op, arguments)
            except (RuntimeError, NotImplementedError):
                continue  # a sample that the CPU refuses
            with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=autocast):
                got = _run(op, there)
            require_same(op.name, got, wanted)
            compared += 1
    return compared


def _moved(value: Any) -> Any:
    if isinstance(value, Tensor) and value.layout == torch.strided:
        return value.detach().to(DEVICE).requires_grad_(value.requires_grad)
    if isinstance(value, torch.device):
        return torch.device(DEVICE)
    return value


def _run(op: Any, arguments: Any) -> Any:
    """The result, then the gradients of its sum where it has one."""
    torch.manual_seed(1)
    first, rest, keywords = arguments
    result = op(first, *rest, **keywords)
    outputs = [
        value
        for value in (result if isinstance(result, (tuple, list)) else [result])
        if isinstance(value, Tensor) and value.requires_grad and value.layout == torch.strided
    ]
    if not outputs:
        return result
    leaves = [
        value
        for value in tree_leaves(arguments)
        if isinstance(value, Tensor) and value.requires_grad and value.is_leaf
    ]
    total = sum(output.abs().sum() for output in outputs)
    assert isinstance(total, Tensor)
    return result, torch.autograd.grad(total, leaves, allow_unused=True)


def require_same(what: str, got: Any, wanted: Any) -> None:
    if isinstance(wanted, Tensor):
        if wanted.layout != torch.strided:
            return
        assert isinstance(got, Tensor), what
        assert got.device.type == DEVICE, f"{what}: the result is on {got.device}"
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape), what
        ours, theirs = (
            value.detach()
            .cpu()
            .resolve_conj()
            .resolve_neg()
            .reshape(-1)
            .clone(memory_format=torch.contiguous_format)
            .view(torch.uint8)
            for value in (got, wanted)
        )
        assert torch.equal(ours, theirs), f"{what}: {got} is not {wanted}"
    elif isinstance(wanted, (tuple, list)):
        assert len(got) == len(wanted), what
        for one, other in zip(got, wanted, strict=True):
            require_same(what, one, other)


CHECKS: tuple[Callable[[], None], ...] = (
    operators_compute_what_the_cpu_does,
    autocast_casts_what_it_casts_on_the_cpu,
)

"""The most that one rank's device holds within each pass of a training action, in bytes.

One process runs the rank's micro-batches on the plain module and counts what tensors hold
while `oracles.wrappers` does with memory what torch's wrapper does at the same moments.
Only sizes matter, so the weights have no meaning.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_engine.contract.case import Case
from fsdp_engine.contract.observation import Numerics
from fsdp_engine.workload.batches import MicroBatch, local_batch
from fsdp_engine.workload.losses import token_loss
from fsdp_engine.workload.models import TORCH_DTYPES, build_model, module_arguments
from oracles.flat import Flat
from oracles.per_parameter import PerParameter
from oracles.wrappers import Unit, Wrapper


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """The most bytes at once in a micro-batch's forward and in its backward.

    Beside what rests on the device, and without what Python still holds of a micro-batch behind
    its forward.
    """

    forward: int
    backward: int


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # so in torch
    """Counts the bytes of tensors that operators make inside, for as long as any holds them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # so in torch
        self._live = self._peak = 0
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        pytree.tree_map_only(Tensor, self._count, result)
        return result

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """These were there before."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._storages[id(storage)] = weakref.ref(storage)

    def take_peak(self) -> int:
        """The most bytes at once since the last call."""
        peak, self._peak = self._peak, self._live
        return peak

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key in self._storages:
            return

        def gone(_: object) -> None:
            self._live -= size
            del self._storages[key]

        self._storages[key] = weakref.ref(storage, gone)
        self._live += size
        self._peak = max(self._peak, self._live)


def footprints(
    case: Case,
    numerics: Numerics,
    *,
    batch: int,
    rank: int,
    plan: Sequence[Sequence[int]],
    first: bool,
) -> tuple[Footprint, ...]:
    """Of every micro-batch of a training action that begins with every unit sharded.

    `first`: the module has not run before.
    """
    data = local_batch(case, batch, rank)
    micro_batches = [data.select(indices) for indices in plan]
    module = build_model(case).train()
    kind = Flat if numerics.semantics == "fsdp1" else PerParameter
    wrapper: Wrapper[Any] = kind(case, numerics, module)
    cast = TORCH_DTYPES[numerics.compute] if numerics.input_cast else None
    for unit in wrapper.units:
        hooked = module.get_submodule(unit.name)
        hooked.register_forward_pre_hook(partial(_enter, wrapper, unit, cast), with_kwargs=True)
        hooked.register_forward_hook(partial(_leave, wrapper, unit))
    found = []
    with Meter() as meter:
        meter.ignore([*wrapper.weights(), *module.buffers()])
        if first:
            wrapper.first_forward()
        for number, micro_batch in enumerate(micro_batches):
            wrapper.syncing = not case.engine.deferred or number == len(plan) - 1
            total, forward = _forward(case, module, micro_batch, meter)
            total.backward()  # type: ignore[no-untyped-call]  # so in torch
            del total
            wrapper.end_backward()
            found.append(Footprint(forward=forward, backward=meter.take_peak()))
    return tuple(found)


def _forward(
    case: Case, module: nn.Module, micro_batch: MicroBatch, meter: Meter
) -> tuple[Tensor, int]:
    """The loss, and the most bytes until the module has returned."""
    on_device = MicroBatch(
        inputs={name: tensor.clone() for name, tensor in micro_batch.inputs.items()},
        targets=micro_batch.targets.clone(),
        loss_mask=micro_batch.loss_mask.clone(),
        indices=micro_batch.indices,
    )
    output = module(**module_arguments(case, on_device.inputs))
    forward = meter.take_peak()
    losses = token_loss(case)(output, on_device)
    return (losses * on_device.loss_mask.to(losses.dtype)).sum(), forward


def _enter(
    wrapper: Wrapper[Any],
    unit: Unit,
    cast: torch.dtype | None,
    _: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if cast is not None:
        args, kwargs = pytree.tree_map_only(Tensor, partial(_cast, cast), (args, kwargs))
    wrapper.pre_forward(unit)
    leaves, structure = pytree.tree_flatten((args, kwargs))
    places = [at for at, leaf in enumerate(leaves) if _needs_gradient(leaf)]
    if places:
        call = partial(wrapper.post_backward, unit)
        inputs = _Behind.apply(call, *(leaves[p] for p in places))  # type: ignore[no-untyped-call]  # so in torch
        for place, tensor in zip(places, inputs, strict=True):
            leaves[place] = tensor
    entered: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_unflatten(leaves, structure)
    return entered


def _leave(wrapper: Wrapper[Any], unit: Unit, _: nn.Module, __: object, output: object) -> None:
    wrapper.post_forward(unit)
    for leaf in filter(_needs_gradient, pytree.tree_leaves(output)):
        leaf.register_hook(lambda _: wrapper.pre_backward(unit))


def _cast(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _needs_gradient(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


class _Behind(torch.autograd.Function):
    """Calls when the gradients of a unit's inputs are there."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], None], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        ctx.call()
        return (None, *gradients)

"""Local shards of parameters and gradients under FSDP1 and FSDP2, without communication.

Checked on torch 2.13. Names are those of the unwrapped module, tied parameters once, under their
first name. A parameter that no wrapper manages is replicated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardDim

from fsdp_engine.contract.observation import FlatRange, Placement, Replicate, Shard
from fsdp_engine.contract.protocol import LocalShard

WRAPPER_PREFIXES = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One parameter's local part: `data` and `grad` have the local shape."""

    name: str
    full_shape: tuple[int, ...]
    placement: Placement
    parameter: Tensor
    data: Tensor
    grad: Tensor | None


def parameter_shards(module: nn.Module) -> Iterator[LocalShard]:
    """This rank's part of every parameter, sharded also where the wrapper holds it in full."""
    for part in _parts(module):
        yield _shard(part, part.data)


def gradient_shards(module: nn.Module) -> Iterator[LocalShard]:
    """This rank's part of every parameter's reduced gradient; `data` None where there is none."""
    for part in _parts(module):
        yield _shard(part, part.grad)


def state_shards(
    module: nn.Module, optimizer: torch.optim.Optimizer, slots: tuple[str, ...]
) -> Iterator[tuple[str, LocalShard]]:
    """This rank's part of the optimizer's state, slot by slot; `data` None where there is none.

    A tensor without dims, such as a step counter, is a number and replicated.
    """
    for part in _parts(module):
        state: dict[str, Tensor] = optimizer.state.get(part.parameter, {})
        for slot in slots:
            value = state.get(slot)
            local = value._local_tensor if isinstance(value, DTensor) else value
            if slot == "step":
                yield (
                    slot,
                    LocalShard(name=part.name, full_shape=(), placement=Replicate(), data=local),
                )
            else:
                yield slot, _shard(part, local)


def write_shards(module: nn.Module, parameters: Iterable[LocalShard]) -> None:
    """Write parts that `parameter_shards` gave back in place."""
    current = {shard.name: shard.data for shard in parameter_shards(module)}
    with torch.no_grad():
        for shard in parameters:
            target = current[shard.name]
            assert target is not None
            assert shard.data is not None
            target.copy_(shard.data)


@torch.no_grad()
def write_state(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Mapping[str, Tensor]],
) -> None:
    """Exchange the optimizer's state for this: parameter name to slot to this rank's elements.

    A parameter that is not named has none afterwards. So it is where FSDP1 leaves a rank without an
    element of a parameter: no gradient reaches it there, and no step.
    """
    optimizer.state.clear()
    for part in _parts(module):
        if part.name not in state or not (part.data.numel() or isinstance(part.parameter, DTensor)):
            continue
        own = optimizer.state[part.parameter]
        for slot, value in state[part.name].items():
            if slot == "step":
                own[slot] = value.reshape(()).clone()
                continue
            whole = own[slot] = torch.zeros_like(part.parameter)
            target = whole._local_tensor if isinstance(whole, DTensor) else whole
            target.copy_(value.view(part.data.shape))


def plain_name(name: str) -> str:
    """A module or parameter path without wrapper prefixes."""
    for prefix in WRAPPER_PREFIXES:
        name = name.replace(prefix, "")
    return name


def fsdp2_names(module: nn.Module) -> dict[int, str]:
    """Identity of each FSDP2 parameter record below `module` to the parameter's name."""
    return _fsdp2_names(list(module.named_modules()))


def _fsdp2_names(modules: list[tuple[str, nn.Module]]) -> dict[int, str]:
    units = [submodule for _, submodule in modules if isinstance(submodule, FSDPModule)]
    if not units:
        return {}
    prefixes = {
        id(submodule): plain_name(path + ".") if path else "" for path, submodule in modules
    }
    return {
        id(record): prefixes[id(record._module_info.module)] + record._module_info.param_name
        for unit in units
        for record in fsdp2_records(unit)
    }


def fsdp2_records(module: FSDPModule) -> list[Any]:
    """FSDP2's own records of the parameters that this unit shards."""
    groups: list[Any] = module._get_fsdp_state()._fsdp_param_groups
    return [record for group in groups for record in group.fsdp_params]


def _shard(part: _Part, data: Tensor | None) -> LocalShard:
    return LocalShard(
        name=part.name,
        full_shape=part.full_shape,
        placement=part.placement,
        data=None if data is None else data.detach(),
    )


def _parts(module: nn.Module) -> Iterator[_Part]:
    managed: set[int] = set()
    modules = list(module.named_modules())
    names = _fsdp2_names(modules)
    for path, submodule in modules:
        prefix = plain_name(path + ".") if path else ""
        if isinstance(submodule, FullyShardedDataParallel) and submodule._handle is not None:
            flat: Any = submodule._handle.flat_param
            managed.update(id(parameter) for parameter in flat._params or (flat,))
            managed.update(id(parameter) for parameter in flat._shared_params or ())
            yield from _flat_parts(submodule._handle, prefix)
        if isinstance(submodule, FSDPModule):
            for record in fsdp2_records(submodule):
                if id(record.sharded_param) in managed:
                    continue  # of modules that were sharded together every one has all of them
                managed.add(id(record.sharded_param))
                managed.add(id(getattr(record, "_unsharded_param", None)))
                yield _dtensor_part(names[id(record)], record.sharded_param)
    for name, parameter in module.named_parameters():
        if id(parameter) in managed:
            continue
        if isinstance(parameter, DTensor):
            yield _dtensor_part(plain_name(name), parameter)
        else:
            yield _Part(
                name=plain_name(name),
                full_shape=tuple(parameter.shape),
                placement=Replicate(),
                parameter=parameter,
                data=parameter.data,
                grad=parameter.grad,
            )


def _dtensor_part(name: str, parameter: DTensor) -> _Part:
    grad = parameter.grad
    return _Part(
        name=name,
        full_shape=tuple(parameter.shape),
        placement=_placement(parameter),
        parameter=parameter,
        data=parameter._local_tensor,
        grad=grad._local_tensor if isinstance(grad, DTensor) else grad,
    )


def _placement(parameter: DTensor) -> Placement:
    sharded = [
        (mesh_dim, placement.dim)
        for mesh_dim, placement in enumerate(parameter.placements)
        if isinstance(placement, ShardDim)
    ]
    if not sharded:
        return Replicate()
    ((mesh_dim, dim),) = sharded
    full, mesh = parameter.shape[dim], parameter.device_mesh
    # Shards are chunks of equal length as `torch.chunk` makes them: the last may be short or empty.
    chunk = -(-full // mesh.size(mesh_dim))
    start = min(chunk * mesh.get_local_rank(mesh_dim), full)
    return Shard(dim=dim, start=start, length=parameter._local_tensor.shape[dim])


def _flat_parts(handle: Any, prefix: str) -> Iterator[_Part]:
    flat = handle.flat_param
    sharded = flat._local_shard if hasattr(flat, "_local_shard") else flat.data
    gradients = flat._params is None and flat.grad is not None
    for index, info in enumerate(flat._shard_param_infos):
        shape, numel = tuple(flat._shapes[index]), int(flat._numels[index])
        start = info.intra_param_start_idx if info.in_shard else 0
        length = info.numel_in_shard if info.in_shard else 0
        offset = info.offset_in_shard if info.in_shard else 0
        if flat._params is not None:
            grad = _original_grad(flat, index, in_shard=info.in_shard)
        else:
            grad = flat.grad[offset : offset + length] if gradients else None
        data = sharded[offset : offset + length]
        whole = not handle.uses_sharded_strategy
        assert not whole or length == numel
        yield _Part(
            name=plain_name(prefix + flat._fqns[index]),
            full_shape=shape,
            placement=Replicate() if whole else FlatRange(start=start, stop=start + length),
            parameter=flat if flat._params is None else flat._params[index],
            data=data.view(shape) if whole else data,
            grad=grad if grad is None else grad.reshape(shape if whole else (-1,)),
        )


def _original_grad(flat: Any, index: int, *, in_shard: bool) -> Tensor | None:
    parameter = flat._params[index]
    if in_shard:
        grad: Tensor | None = parameter.grad
        return grad
    # A rank without a part holds no view of the gradient: what the unit has tells.
    present = (
        parameter.requires_grad and flat.grad is not None and not flat._is_grad_none_mask[index]
    )
    return torch.empty(0, dtype=flat.grad.dtype) if present else None

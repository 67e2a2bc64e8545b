"""Export the weights: full tensors under the names of the unwrapped model's `state_dict`.

Names, order, shapes and dtypes are those of the model before it was wrapped: persistent buffers
included, tied parameters under each of their names. One tensor is gathered at a time and nothing
of the module's state changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_engine.contract.observation import FlatRange
from fsdp_engine.contract.protocol import LocalShard
from fsdp_engine.torch_private.shards import parameter_shards, plain_name


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportEntry:
    """One name of the state dict: a parameter by its first name, or a buffer where it is."""

    name: str
    parameter: str | None
    module: nn.Module
    attribute: str


def export_entries(model: nn.Module) -> tuple[ExportEntry, ...]:
    """What to export, read from the model before it is wrapped."""
    first_names = {id(parameter): name for name, parameter in model.named_parameters()}
    entries: list[ExportEntry] = []
    for name in model.state_dict():
        path, _, attribute = name.rpartition(".")
        module = model.get_submodule(path)
        tensor = getattr(module, attribute)
        first = first_names.get(id(tensor))
        entries.append(ExportEntry(name=name, parameter=first, module=module, attribute=attribute))
    return tuple(entries)


@torch.no_grad()
def gather_all(
    root: nn.Module, entries: tuple[ExportEntry, ...], mesh: DeviceMesh, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Every entry as a full tensor of its own on `device`. Collective: all ranks drain it."""
    shards = {shard.name: shard for shard in parameter_shards(root)}
    registered = dict(_by_slot(root))
    ranges = _flat_ranges(shards, mesh, device)
    for entry in entries:
        if entry.parameter is None:
            tensor = getattr(entry.module, entry.attribute).detach().clone()
        elif entry.parameter in ranges:
            shard = shards[entry.parameter]
            tensor = _gather_flat(shard, ranges[entry.parameter], mesh)
        else:
            tensor = _full(registered[entry.parameter], shards[entry.parameter])
        yield entry.name, tensor.to(device)


def _full(parameter: Tensor, shard: LocalShard) -> Tensor:
    if isinstance(parameter, DTensor):
        full: Tensor = parameter.full_tensor()
        return full.detach().clone()
    assert shard.data is not None
    return shard.data.clone()


def _by_slot(root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in root.named_parameters():
        yield plain_name(name), parameter


def _flat_ranges(
    shards: dict[str, LocalShard], mesh: DeviceMesh, device: torch.device
) -> dict[str, list[tuple[int, int]]]:
    """For every flat parameter each shard rank's part, by one all-gather of their bounds."""
    flat = {n: s.placement for n, s in shards.items() if isinstance(s.placement, FlatRange)}
    if not flat:
        return {}
    group = mesh.get_group("shard")
    own = torch.tensor([bound for p in flat.values() for bound in (p.start, p.stop)], device=device)
    gathered = own.new_empty(dist.get_world_size(group) * len(own))
    dist.all_gather_into_tensor(gathered, own, group=group)
    bounds = gathered.view(-1, len(flat), 2).tolist()
    return {
        name: [(start, stop) for start, stop in (of_rank[index] for of_rank in bounds)]
        for index, name in enumerate(flat)
    }


def _gather_flat(shard: LocalShard, ranges: list[tuple[int, int]], mesh: DeviceMesh) -> Tensor:
    """The full tensor from every rank's part, padded to the longest: a copy of bits, no sum."""
    assert shard.data is not None
    longest = max(stop - start for start, stop in ranges)
    own = shard.data.new_zeros(longest)
    own[: shard.data.numel()] = shard.data.flatten()
    gathered = own.new_empty(len(ranges) * longest)
    dist.all_gather_into_tensor(gathered, own, group=mesh.get_group("shard"))
    full = own.new_empty(shard.full_shape)
    flat = full.view(-1)
    for row, (start, stop) in zip(gathered.view(-1, longest), ranges, strict=True):
        flat[start:stop] = row[: stop - start]
    return full

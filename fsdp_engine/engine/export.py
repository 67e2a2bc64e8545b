"""Export the weights: full tensors under the names of the unwrapped model's `state_dict`.

Names, order, shapes and dtypes are those of the model before it was wrapped: persistent buffers
included, tied parameters under each of their names. One tensor is gathered at a time and nothing
of the module's state changes.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_engine.contract.errors import ConfigError
from fsdp_engine.contract.observation import FlatRange
from fsdp_engine.contract.protocol import LocalShard
from fsdp_engine.engine.packing import gather_packed, ranges_of_ranks
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


def require_distinct(entries: Iterable[ExportEntry]) -> tuple[ExportEntry, ...]:
    """The entries, no two of them under one name."""
    entries = tuple(entries)
    counts = Counter(entry.name for entry in entries)
    twice = sorted(name for name, count in counts.items() if count > 1)
    if twice:
        raise ConfigError(f"export: {twice[0]} would be the name of two tensors")
    return entries


@torch.no_grad()
def gather_all(
    root: nn.Module, entries: tuple[ExportEntry, ...], mesh: DeviceMesh, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Every entry as a full tensor of its own on `device`. Collective: all ranks drain it."""
    shards = {shard.name: shard for shard in parameter_shards(root)}
    registered = dict(_by_slot(root))
    flat = [shard for shard in shards.values() if isinstance(shard.placement, FlatRange)]
    ranges = ranges_of_ranks(flat, mesh, device)
    for entry in entries:
        if entry.parameter is None:
            tensor = getattr(entry.module, entry.attribute).detach().clone()
        elif entry.parameter in ranges:
            (tensor,) = gather_packed([shards[entry.parameter]], ranges, mesh, device)
        else:
            tensor = _full(registered[entry.parameter], shards[entry.parameter], device)
        yield entry.name, tensor.to(device)


@torch.no_grad()
def gather_groups(
    root: nn.Module,
    groups: Iterable[tuple[ExportEntry, ...]],
    mesh: DeviceMesh,
    device: torch.device,
) -> Iterator[tuple[str, Tensor]]:
    """Parameters of one dtype, a group of entries at a time by one collective each."""
    groups = tuple(groups)
    shards = {shard.name: shard for shard in parameter_shards(root)}
    wanted = [[shards[str(entry.parameter)] for entry in group] for group in groups]
    ranges = ranges_of_ranks(itertools.chain(*wanted), mesh, device)
    for group, own in zip(groups, wanted, strict=True):
        for entry, tensor in zip(group, gather_packed(own, ranges, mesh, device), strict=True):
            yield entry.name, tensor


def _full(parameter: Tensor, shard: LocalShard, device: torch.device) -> Tensor:
    if isinstance(parameter, DTensor):
        own: Any = parameter.to(device)  # a part that rests on the host is copied alone
        full: Tensor = own.full_tensor()
        return full.detach().clone()
    assert shard.data is not None
    return shard.data.clone()


def _by_slot(root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in root.named_parameters():
        yield plain_name(name), parameter

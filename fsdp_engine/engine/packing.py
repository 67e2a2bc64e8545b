"""Full tensors from every shard rank's part, several of them by one collective."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fsdp_engine.contract.observation import FlatRange, Shard
from fsdp_engine.contract.protocol import LocalShard

Range: TypeAlias = tuple[int, int]
"""First element and the one behind the last, of the full tensor in row-major order."""


def ranges_of_ranks(
    shards: Iterable[LocalShard], mesh: DeviceMesh, device: torch.device
) -> dict[str, list[Range]]:
    """For every parameter each shard rank's part, by one all-gather of their bounds."""
    ranges = {shard.name: flat_range(shard) for shard in shards}
    if not ranges:
        return {}
    group = mesh.get_group("shard")
    own = torch.tensor(list(ranges.values()), device=device).flatten()
    gathered = own.new_empty(dist.get_world_size(group) * len(own))
    dist.all_gather_into_tensor(gathered, own, group=group)
    bounds = gathered.view(-1, len(ranges), 2).tolist()
    return {
        name: [(rank[index][0], rank[index][1]) for rank in bounds]
        for index, name in enumerate(ranges)
    }


def flat_range(shard: LocalShard) -> Range:
    """Where this rank's part is in the full tensor; rows are consecutive elements."""
    match shard.placement:
        case FlatRange(start=start, stop=stop):
            return start, stop
        case Shard(dim=dim, start=start, length=length):
            assert dim == 0
            row = math.prod(shard.full_shape[1:])
            return start * row, (start + length) * row
        case _:
            return 0, math.prod(shard.full_shape)


def gather_packed(
    shards: Sequence[LocalShard],
    ranges: dict[str, list[Range]],
    mesh: DeviceMesh,
    device: torch.device,
) -> list[Tensor]:
    """The full tensors on `device` of parts of one dtype: copies of bits, no sum.

    Every rank sends its parts one behind the other, padded to the longest that any rank sends.
    They are packed where they are and padded on the device, so parts on the host take one copy.
    """
    lengths = [[stop - start for start, stop in ranges[shard.name]] for shard in shards]
    longest = max(map(sum, zip(*lengths, strict=True)))
    parts = [shard.data.flatten() for shard in shards if shard.data is not None]
    assert len(parts) == len(shards)
    packed = parts[0] if len(parts) == 1 else torch.cat(parts)
    own = packed.new_zeros(longest, device=device)
    own[: len(packed)] = packed
    num_ranks = len(lengths[0])
    gathered = own.new_empty(num_ranks * longest)
    dist.all_gather_into_tensor(gathered, own, group=mesh.get_group("shard"))
    tensors = [own.new_empty(shard.full_shape) for shard in shards]
    for rank, row in enumerate(gathered.view(num_ranks, longest)):
        at = 0
        for shard, tensor in zip(shards, tensors, strict=True):
            start, stop = ranges[shard.name][rank]
            tensor.view(-1)[start:stop] = row[at : at + stop - start]
            at += stop - start
    return tensors

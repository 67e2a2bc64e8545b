"""Shards of any wrapper in `torch.distributed.checkpoint`: intervals of a flat tensor.

A tensor is kept as the vector of its elements in row-major order. What a rank holds of it is one
interval of that, whichever wrapper and mesh made the shard: the flat range of FSDP1, the rows of
FSDP2, or all of it. So a checkpoint does not depend on them, and reading it by other intervals is
resharding. Files are `safetensors`: reading one runs no code of whoever wrote it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from fsdp_engine.contract.errors import CheckpointError
from fsdp_engine.contract.observation import Shard
from fsdp_engine.contract.protocol import LocalShard
from fsdp_engine.engine.packing import flat_range


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Elements from `start` on of a flat tensor of `size`: `data` is one-dimensional, on the CPU.

    `shape` is that of the full tensor.
    """

    shape: tuple[int, ...]
    start: int
    data: Tensor

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def interval_of(shard: LocalShard, data: Tensor) -> Interval:
    """Where the shard lies in the flat tensor, with the elements `data`."""
    placement = shard.placement
    if isinstance(placement, Shard) and placement.dim != 0:
        raise CheckpointError(f"{shard.name}: sharded along dim {placement.dim}; legal is dim 0")
    start, _ = flat_range(shard)
    shape = tuple(shard.full_shape)
    return Interval(shape=shape, start=start, data=data.detach().cpu().reshape(-1))


def write(folder: Path, intervals: Mapping[str, Interval]) -> None:
    """Write every rank's intervals below `folder`. A collective call.

    Parts that several ranks hold are written once. On all ranks alike:

    Raises:
        CheckpointError: a rank cannot write, or the ranks' intervals do not make whole tensors.
    """
    filled = _filled(intervals)
    storage = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        dcp.save(filled, storage_writer=storage, planner=_Saving(filled))
    except dcp.CheckpointException as error:
        raise CheckpointError(f"{folder}: not written: {error}") from error


def read(folder: Path, intervals: Mapping[str, Interval]) -> None:
    """Fill the intervals' data from the files below `folder`. A collective call.

    On all ranks alike:

    Raises:
        CheckpointError: a rank cannot read, or not all that it wants is there.
    """
    filled = _filled(intervals)
    storage = dcp.HuggingFaceStorageReader(str(folder))
    try:
        dcp.load(filled, storage_reader=storage, planner=_Loading(filled))
    except dcp.CheckpointException as error:
        raise CheckpointError(f"{folder}: not read: {error}") from error


class _Saving(dcp.DefaultSavePlanner):
    """Plans one chunk per interval; the default drops doubles and looks for gaps."""

    def __init__(self, intervals: Mapping[str, Interval]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._intervals = intervals

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_write_item(*pair) for pair in self._intervals.items()])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._intervals[write_item.index.fqn].data


class _Loading(LoadPlanner):
    """Plans the reads that fill the intervals, whatever chunks there are."""

    def __init__(self, intervals: Mapping[str, Interval]) -> None:
        self._intervals = intervals
        self._metadata: Metadata | None = None

    def set_up_planner(
        self,
        state_dict: dict[str, Any],  # noqa: ARG002  the interface's names
        metadata: Metadata | None = None,
        is_coordinator: bool = False,  # noqa: ARG002, FBT001, FBT002
    ) -> None:
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        assert self._metadata is not None
        items: list[ReadItem] = []
        for key, interval in self._intervals.items():
            found = self._metadata.state_dict_metadata.get(key)
            items += _read_items(key, interval, found)
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:  # noqa: ARG002
        raise CheckpointError(f"{read_item.storage_index.fqn}: no tensor; legal are tensors only")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        (start,), (length,) = read_item.dest_offsets, read_item.lengths
        return self._intervals[read_item.dest_index.fqn].data[start : start + length]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass


def _filled(intervals: Mapping[str, Interval]) -> dict[str, Any]:
    """Those that have elements: a rank may hold nothing of a tensor."""
    return {key: interval for key, interval in intervals.items() if interval.data.numel()}


def _write_item(key: str, interval: Interval) -> WriteItem:
    chunk = _chunk(interval)
    return WriteItem(
        index=MetadataIndex(key, chunk.offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=chunk,
            properties=TensorProperties(dtype=interval.data.dtype),
            size=torch.Size([interval.size]),
        ),
    )


def _read_items(key: str, interval: Interval, found: object) -> list[ReadItem]:
    if not isinstance(found, TensorStorageMetadata):
        raise CheckpointError(f"{key}: no file has it")
    dtype, wanted = found.properties.dtype, interval.data.dtype
    if tuple(found.size) != (interval.size,) or dtype != wanted:
        raise CheckpointError(
            f"{key}: the files have {tuple(found.size)} {dtype}, wanted ({interval.size},) {wanted}"
        )
    items = create_read_items_for_chunk_list(key, found, [_chunk(interval)])
    num_read = sum(item.lengths.numel() for item in items)
    if num_read != interval.data.numel():
        raise CheckpointError(
            f"{key}: the files have {num_read} of elements {interval.start} to "
            f"{interval.start + interval.data.numel()}"
        )
    return items


def _chunk(interval: Interval) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(
        offsets=torch.Size([interval.start]), sizes=torch.Size([interval.data.numel()])
    )

"""Checkpoints: weights, buffers, optimizer, schedule and random numbers, saved whole or not at all.

Tensors are kept by the unwrapped model's names in intervals of flat tensors (`checkpoint_plan`), so
a checkpoint is loaded on any mesh and by either strategy. The folder and its manifest are in
`checkpoint_files`. Loading first reads everything beside the engine, on every rank; only when all
ranks have found it sound does any of them write. What a checkpoint has not: gradients, which
parameters train, and the configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_engine.contract.errors import CheckpointError, ConfigError
from fsdp_engine.engine import checkpoint_files as files
from fsdp_engine.engine import checkpoint_plan as plan
from fsdp_engine.engine.agreement import agreed, gathered, on_first_rank, share
from fsdp_engine.engine.checkpoint_contents import (
    BUFFER,
    MODEL,
    OPTIMIZER,
    RANDOM,
    require_model,
    require_optimization,
    require_random,
)
from fsdp_engine.engine.checkpoint_files import FileInfo, Manifest, ScheduleInfo, TensorInfo
from fsdp_engine.engine.checkpoint_plan import Interval, interval_of
from fsdp_engine.engine.export import ExportEntry
from fsdp_engine.torch_private.shards import (
    parameter_shards,
    state_shards,
    write_shards,
    write_state,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimization:
    """Optimizer and schedule; `slots` are the optimizer's tensors per parameter."""

    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LambdaLR
    slots: tuple[str, ...]

    @property
    def name(self) -> str:
        return type(self.optimizer).__name__


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What of an engine goes into a checkpoint, and where it comes back to.

    Without an optimization a checkpoint has the model alone, and only the model is loaded.
    """

    module: nn.Module
    entries: tuple[ExportEntry, ...]
    optimization: Optimization | None
    device: torch.device


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Which checkpoint was loaded; `notes` say in words what of it was not."""

    path: Path
    notes: tuple[str, ...] = ()


def save(held: Held, root: Path, *, max_to_keep: int | None = None) -> Path:
    """Write the next checkpoint below `root` and return its folder. A collective call.

    With `max_to_keep` all but so many of the newest are removed once the new one is on disk.

    Raises:
        ConfigError: `max_to_keep` is less than one.
        CheckpointError: on all ranks alike, and earlier checkpoints are as they were.
    """
    if max_to_keep is not None and max_to_keep < 1:
        raise ConfigError(f"max_to_keep: {max_to_keep!r} is not legal; legal is None or at least 1")
    intervals = dict(_present(held)) | dict(_random(held))
    folder = on_first_rank(lambda: files.begin(root))
    try:
        plan.write(folder, intervals)
        manifest = _manifest(held, folder, intervals)
        place = on_first_rank(lambda: files.commit(folder, manifest))
    except CheckpointError:
        if dist.get_rank() == 0:
            files.abandon(folder)
        raise
    if max_to_keep is not None:
        on_first_rank(lambda: files.retain(root, max_to_keep))
    return place


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A checkpoint that every rank has read and found sound; nothing is touched before `write`."""

    held: Held
    manifest: Manifest
    intervals: Mapping[str, Interval]
    loaded: Loaded

    @torch.no_grad()
    def write(self) -> None:
        """Put everything in place; no communication, and nothing that may fail."""
        held, intervals = self.held, self.intervals
        write_shards(
            held.module,
            [
                replace(shard, data=intervals[MODEL + shard.name].data.view(shard.data.shape))
                for shard in parameter_shards(held.module)
                if shard.data is not None
            ],
        )
        for entry in _buffers(held):
            _buffer(entry).copy_(intervals[BUFFER + entry.name].data.view(_buffer(entry).shape))
        if held.optimization is not None:
            state = _by_parameter(intervals)
            write_state(held.module, held.optimization.optimizer, state)
            self._write_schedule(held.optimization.schedule)
        for key, setter in _random_setters(held):
            if key in intervals:
                setter(intervals[key].data)

    def _write_schedule(self, schedule: torch.optim.lr_scheduler.LambdaLR) -> None:
        info = self.manifest.schedule
        assert info is not None
        schedule.load_state_dict(
            schedule.state_dict()
            | {
                "last_epoch": info.steps,
                "_step_count": info.steps + 1,
                "base_lrs": list(info.base_lrs),
                "_last_lr": list(info.lrs),
            }
        )
        for group, lr in zip(schedule.optimizer.param_groups, info.lrs, strict=True):
            group["lr"] = lr


def prepare(held: Held, path: Path) -> Ready:
    """Read the checkpoint at `path`, or the newest below it, and change nothing. A collective call.

    Raises:
        CheckpointError: on all ranks alike: no checkpoint, a file missing, foreign or damaged, or
            names, shapes, dtypes or an optimizer other than the engine's.
    """
    folder = on_first_rank(lambda: files.find(path))
    manifest = agreed(lambda: _sound(held, folder))
    intervals = dict(_wanted(held, manifest))
    plan.read(folder, intervals)
    notes: tuple[str, ...] = ()
    saved, here = manifest.world_size, dist.get_world_size()
    if saved != here:
        notes = (f"random numbers are left as they are: of {saved} ranks, there are {here}",)
    loaded = Loaded(path=folder, notes=notes)
    return Ready(held=held, manifest=manifest, intervals=intervals, loaded=loaded)


def _present(held: Held) -> Iterator[tuple[str, Interval]]:
    """This rank's part of everything but random numbers, by key."""
    for shard in parameter_shards(held.module):
        assert shard.data is not None
        yield MODEL + shard.name, interval_of(shard, shard.data)
    for entry in _buffers(held):
        yield BUFFER + entry.name, _whole(_buffer(entry))
    if (own := held.optimization) is not None:
        for slot, shard in state_shards(held.module, own.optimizer, own.slots):
            if shard.data is not None:
                yield f"{OPTIMIZER}{slot}/{shard.name}", interval_of(shard, shard.data)


def _random(held: Held) -> Iterator[tuple[str, Interval]]:
    yield _random_key("cpu"), _whole(torch.get_rng_state())
    if held.device.type != "cpu":
        state = torch.get_device_module(held.device).get_rng_state()
        yield _random_key(held.device.type), _whole(state)


def _random_setters(held: Held) -> Iterator[tuple[str, Callable[[Tensor], Any]]]:
    yield _random_key("cpu"), torch.set_rng_state
    if held.device.type != "cpu":
        setter = torch.get_device_module(held.device).set_rng_state
        yield _random_key(held.device.type), setter


def _random_key(device_type: str) -> str:
    """Every rank has a stream of its own."""
    return f"{RANDOM}{dist.get_rank()}/{device_type}"


def _manifest(held: Held, folder: Path, intervals: Mapping[str, Interval]) -> Manifest:
    """Of what all ranks have written, which is on disk when this returns. A collective call."""
    own = _infos(intervals.items())
    described = agreed(lambda: _synced(folder))
    tensors: dict[str, TensorInfo] = {}
    digests: dict[str, FileInfo] = {}
    for rank_tensors, rank_digests in gathered((own, described)):
        tensors |= rank_tensors
        digests |= rank_digests
    return Manifest(
        world_size=dist.get_world_size(),
        optimizer="" if held.optimization is None else held.optimization.name,
        schedule=None if held.optimization is None else _schedule_info(held.optimization.schedule),
        tensors=tensors,
        files=digests,
    )


def _schedule_info(schedule: torch.optim.lr_scheduler.LambdaLR) -> ScheduleInfo:
    return ScheduleInfo(
        steps=schedule.last_epoch,
        base_lrs=tuple(map(float, schedule.base_lrs)),
        lrs=tuple(float(group["lr"]) for group in schedule.optimizer.param_groups),
    )


def _synced(folder: Path) -> dict[str, FileInfo]:
    """This rank's share of the files, brought to disk."""
    described = {}
    for name in share(files.names(folder)):
        files.sync(folder / name)
        described[name] = files.describe(folder / name)
    return described


def _sound(held: Held, folder: Path) -> Manifest:
    """The manifest, when files and engine fit it. Raises `CheckpointError`."""
    manifest = files.read_manifest(folder)
    files.require_files(folder, manifest)
    files.require_digests(folder, manifest, share(sorted(manifest.files)))
    require_model(folder, manifest, _infos(_present(replace(held, optimization=None))))
    if (own := held.optimization) is not None:
        groups = len(own.schedule.base_lrs)
        require_optimization(folder, manifest, name=own.name, slots=own.slots, groups=groups)
    require_random(folder, manifest, _infos(_random(held)))
    return manifest


def _wanted(held: Held, manifest: Manifest) -> Iterator[tuple[str, Interval]]:
    """Empty intervals to read into: this rank's part, as the checkpoint has it."""
    slots = () if held.optimization is None else held.optimization.slots
    for shard in parameter_shards(held.module):
        assert shard.data is not None
        interval = interval_of(shard, torch.empty_like(shard.data, device="cpu"))
        yield MODEL + shard.name, interval
        for slot in slots:
            key = f"{OPTIMIZER}{slot}/{shard.name}"
            if key in manifest.tensors:
                number = Interval(shape=(), start=0, data=torch.empty(1))
                empty = torch.empty_like(interval.data)
                yield key, number if slot == "step" else replace(interval, data=empty)
    for entry in _buffers(held):
        yield BUFFER + entry.name, _whole(torch.empty_like(_buffer(entry), device="cpu"))
    if manifest.world_size == dist.get_world_size():
        for key, _ in _random_setters(held):
            if key in manifest.tensors:
                shape = manifest.tensors[key].shape
                yield key, _whole(torch.empty(shape, dtype=torch.uint8))


def _by_parameter(intervals: Mapping[str, Interval]) -> dict[str, dict[str, Tensor]]:
    """Parameter name to slot to this rank's part of the optimizer's state."""
    state: dict[str, dict[str, Tensor]] = {}
    for key in filter(lambda key: key.startswith(OPTIMIZER), intervals):
        _, slot, name = key.split("/", 2)
        state.setdefault(name, {})[slot] = intervals[key].data
    return state


def _buffers(held: Held) -> Iterator[ExportEntry]:
    return (entry for entry in held.entries if entry.parameter is None)


def _buffer(entry: ExportEntry) -> Tensor:
    tensor: Tensor = getattr(entry.module, entry.attribute)
    return tensor


def _whole(tensor: Tensor) -> Interval:
    """A copy of a tensor that this rank has in full."""
    data = tensor.detach().clone().cpu().reshape(-1)
    return Interval(shape=tuple(tensor.shape), start=0, data=data)


def _infos(intervals: Iterable[tuple[str, Interval]]) -> dict[str, TensorInfo]:
    return {
        key: TensorInfo(shape=interval.shape, dtype=str(interval.data.dtype).removeprefix("torch."))
        for key, interval in intervals
    }

"""Faults in checkpoints: in what is saved, what is loaded, and what is taken for whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_engine.adapters import reference as adapter
from fsdp_engine.contract.errors import CheckpointError
from fsdp_engine.contract.protocol import LocalShard
from fsdp_engine.engine import checkpoint, checkpoint_files, checkpoint_plan
from fsdp_engine.engine.checkpoint import Held, Loaded, Ready
from fsdp_engine.engine.checkpoint_contents import RANDOM
from fsdp_engine.engine.checkpoint_files import Manifest
from fsdp_engine.engine.checkpoint_plan import Interval
from fsdp_engine.engine.engine import FsdpEngine
from fsdp_engine.torch_private.shards import write_shards, write_state
from tests.faults.planting import Planted

State = Mapping[str, Mapping[str, Tensor]]
Intervals = Iterator[tuple[str, Interval]]

_find, _interval_of, _wanted = (
    checkpoint_files.find,
    checkpoint_plan.interval_of,
    checkpoint._wanted,
)
_write_schedule, _write = Ready._write_schedule, Ready.write
_read_items, _require_digests = checkpoint_plan._read_items, checkpoint_files.require_digests
_by_parameter = checkpoint._by_parameter


def _nothing(*_: object) -> None:
    pass


def _without_steps(module: nn.Module, optimizer: torch.optim.Optimizer, state: State) -> None:
    zero = torch.zeros(1)
    lost = {name: {**slots, "step": zero} if slots else slots for name, slots in state.items()}
    write_state(module, optimizer, lost)


class StepCountersLost(Planted):
    """Moments are loaded, and AdamW's step counters begin again."""

    exchanged = ((checkpoint, "write_state", _without_steps),)


class OptimizerNotLoaded(Planted):
    """Only the model is loaded."""

    exchanged = ((checkpoint, "write_state", _nothing),)


def _in_wrong_order(intervals: Mapping[str, Interval]) -> dict[str, dict[str, Tensor]]:
    state = _by_parameter(intervals)
    by_size: dict[int, list[str]] = {}
    for name in sorted(state):
        by_size.setdefault(state[name]["exp_avg"].numel(), []).append(name)
    order = {name: names[at - 1] for names in by_size.values() for at, name in enumerate(names)}
    return {name: state[order[name]] for name in state}


class StateInWrongOrder(Planted):
    """Optimizer state goes to other parameters of the same size."""

    exchanged = ((checkpoint, "_by_parameter", _in_wrong_order),)


def _swapped(intervals: Mapping[str, Interval]) -> dict[str, dict[str, Tensor]]:
    names = {"exp_avg": "exp_avg_sq", "exp_avg_sq": "exp_avg"}
    return {
        parameter: {names.get(slot, slot): value for slot, value in slots.items()}
        for parameter, slots in _by_parameter(intervals).items()
    }


class MomentsSwapped(Planted):
    """The two moments are told apart by their order."""

    exchanged = ((checkpoint, "_by_parameter", _swapped),)


class ScheduleNotLoaded(Planted):
    """The schedule goes on from where it was."""

    exchanged = ((Ready, "_write_schedule", _nothing),)


def _without_rates(self: Ready, schedule: torch.optim.lr_scheduler.LambdaLR) -> None:
    rates = [group["lr"] for group in schedule.optimizer.param_groups]
    _write_schedule(self, schedule)
    for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


class RateNotLoaded(Planted):
    """The scheduler's count comes back, the optimizer's rate for the next step does not."""

    exchanged = ((Ready, "_write_schedule", _without_rates),)


def _from_first_rank(held: Held, manifest: Manifest) -> Intervals:
    for key, interval in _wanted(held, manifest):
        yield key, replace(interval, start=0)


class FirstRanksShardForAll(Planted):
    """Every rank loads the first rank's part as its own."""

    exchanged = ((checkpoint, "_wanted", _from_first_rank),)


def _even(held: Held, manifest: Manifest) -> Intervals:
    for key, interval in _wanted(held, manifest):
        length = interval.data.numel()
        start = dist.get_rank() * length if interval.start else 0
        yield key, replace(interval, start=min(start, interval.size - length))


class ShardsTakenForEven(Planted):
    """A part is looked for at the rank times its length, as if all were of one length."""

    exchanged = ((checkpoint, "_wanted", _even),)


def _rounded(shard: LocalShard, data: Tensor) -> Interval:
    interval = _interval_of(shard, data)
    if not data.is_floating_point() or not shard.full_shape:
        return interval
    return replace(interval, data=interval.data.bfloat16().to(data.dtype))


class SavedInBf16(Planted):
    """Weights and moments are rounded to bf16 on their way into the checkpoint."""

    exchanged = ((checkpoint, "interval_of", _rounded),)


class RandomOfFirstRank(Planted):
    """One random state is saved, and all ranks go on with it."""

    exchanged = ((checkpoint, "_random_key", lambda device: f"{RANDOM}0/{device}"),)


class RandomNotLoaded(Planted):
    """The random state is saved and not loaded."""

    exchanged = ((checkpoint, "_random_setters", lambda _: iter(())),)


def _remove_too_many(root: Path, max_to_keep: int) -> None:
    kept = checkpoint_files.checkpoints(root)
    for path in kept[: len(kept) - max_to_keep + 1]:
        checkpoint_files.abandon(path)


class OnlyCheckpointRemoved(Planted):
    """Retention counts the new checkpoint as one that is still to come."""

    exchanged = ((checkpoint_files, "retain", _remove_too_many),)


def _oldest(path: Path) -> Path:
    return checkpoint_files.checkpoints(_find(path).parent)[0]


class OldestLoaded(Planted):
    """Of several checkpoints the first one is loaded, not the last."""

    exchanged = ((checkpoint_files, "find", _oldest),)


class _WithoutOptimizerWhenNew(FsdpEngine):
    def load(self, path: str | Path) -> Loaded:
        optimization = self._optimization
        new = optimization is not None and not optimization._optimizer.state
        loaded = super().load(path)
        if new and optimization is not None:
            optimization._optimizer.state.clear()
        return loaded


class NewOptimizerStaysEmpty(Planted):
    """An optimizer that has not stepped yet is not given a state."""

    exchanged = ((adapter, "FsdpEngine", _WithoutOptimizerWhenNew),)


def _on_first_replica(self: Ready) -> None:
    root = self.held.module
    mesh: Any = next((p.device_mesh for p in root.parameters() if hasattr(p, "device_mesh")), None)
    shards = dist.get_world_size() if mesh is None else mesh.shape[-1]
    if dist.get_rank() < shards:
        _write(self)


class OtherReplicasNotLoaded(Planted):
    """Only the first replica's ranks load."""

    exchanged = ((Ready, "write", _on_first_replica),)


def _without_tied(module: nn.Module, parameters: Iterable[LocalShard]) -> None:
    names = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
    tied = {name for name, p in module.named_parameters() if names[id(p)] > 1}
    write_shards(module, [s for s in parameters if not any(t.endswith(s.name) for t in tied)])


class TiedWeightNotLoaded(Planted):
    """A weight of two names is found under neither."""

    exchanged = ((checkpoint, "write_shards", _without_tied),)


class BytesUnchecked(Planted):
    """Sizes are compared and digests are not."""

    exchanged = ((checkpoint_files, "require_digests", _nothing),)


class _ChecksAfterwards(FsdpEngine):
    def load(self, path: str | Path) -> Loaded:
        loaded = super().load(path)
        manifest = checkpoint_files.read_manifest(loaded.path)
        _require_digests(loaded.path, manifest, manifest.files)
        return loaded


class CheckedAfterLoading(Planted):
    """A damaged checkpoint is refused when it is loaded already."""

    exchanged = (
        (adapter, "FsdpEngine", _ChecksAfterwards),
        (checkpoint_files, "require_digests", _nothing),
    )


def _whatever_is_there(key: str, interval: Interval, found: object) -> list[Any]:
    try:
        return _read_items(key, interval, found)
    except CheckpointError:
        return []


class MissingFilesTakenForEmpty(Planted):
    """A file that is not there counts as one in which nothing is."""

    exchanged = (
        (checkpoint_files, "require_files", _nothing),
        (checkpoint_files, "require_digests", _nothing),
        (checkpoint_plan, "_read_items", _whatever_is_there),
    )


class _SavesInEvalMode(FsdpEngine):
    def save(self, path: str | Path, *, max_to_keep: int | None = None) -> Path:
        self.module.eval()
        return super().save(path, max_to_keep=max_to_keep)


class SaveLeavesEvalMode(Planted):
    """Saving switches to eval mode and does not switch back."""

    exchanged = ((adapter, "FsdpEngine", _SavesInEvalMode),)


class _SavesAndSteps(FsdpEngine):
    def save(self, path: str | Path, *, max_to_keep: int | None = None) -> Path:
        place = super().save(path, max_to_keep=max_to_keep)
        self.lr_step()
        return place


class SaveAdvancesSchedule(Planted):
    """Every save counts as a step of the schedule."""

    exchanged = ((adapter, "FsdpEngine", _SavesAndSteps),)

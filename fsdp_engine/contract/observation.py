"""What a run showed: plain data, tensor-free, from every rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from fsdp_engine.contract.case import Dtype

Phase: TypeAlias = Literal[
    "build", "enter", "plan", "forward", "backward", "step", "leave", "export", "move", "other"
]
Operation: TypeAlias = Literal["all_gather", "reduce_scatter", "all_reduce", "broadcast", "other"]
Axis: TypeAlias = Literal["shard", "replicate", "world", "self", "other"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Array:
    """A tensor as data: contiguous row-major elements, little-endian.

    `dtype` is torch's name, for example `bfloat16`, `float32`, `int64`, `bool`.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Rows `start` to `start + length` of dimension `dim` of the full tensor."""

    kind: Literal["shard"] = "shard"
    dim: int = 0
    start: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatRange:
    """Elements `start` to `stop` of the full tensor in row-major order."""

    kind: Literal["flat"] = "flat"
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicate:
    """The full tensor."""

    kind: Literal["replicate"] = "replicate"


Placement: TypeAlias = Shard | FlatRange | Replicate


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalArray:
    """One rank's part of a named tensor. `data` None: absent (a gradient that is None).

    `name` is the parameter's name in the model that `workload` builds.
    """

    name: str
    full_shape: tuple[int, ...]
    placement: Placement
    data: Array | None


OptimizerState: TypeAlias = dict[str, tuple[LocalArray, ...]]
"""Slot to this rank's parts, by parameter name: `step` (a number), `exp_avg`, `exp_avg_sq`, ..."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective as one rank issued it.

    `elements` counts what is communicated whole: the output of an all-gather, the input of a
    reduce-scatter, the tensor of an all-reduce. `axis` is the mesh axis whose group has the same
    ranks: `world` for all ranks where that is no axis of its own, `self` for a group of one rank
    that is no axis of the mesh. On a 1-D mesh the group of all ranks is `shard`.
    `micro_batch` counts root forwards of the action from 0; -1 before the first.
    """

    operation: Operation
    axis: Axis
    group_size: int
    dtype: str
    elements: int
    phase: Phase
    micro_batch: int
    reduce_op: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One copy to, from or on a device, as one rank made it.

    `implicit`: a single element was read, as `.item()` and comparisons do. `blocking` is what was
    asked for. `micro_batch` as of `Collective`. `enter` and `leave` are the phases of a training
    action's mode, before its plan and behind its step.
    """

    direction: Literal["host_to_device", "device_to_host", "device_to_device"]
    num_bytes: int
    blocking: bool
    implicit: bool
    phase: Phase
    micro_batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Residency:
    """What one rank holds at one moment of a micro-batch, in bytes per parameter name.

    `parameters` are the storages of the module's parameters as registered then; `unsharded` names
    the parameters that are resident in full (on a shard axis of one: all of them).
    `retained_gradient_bytes` and `retained_parameter_bytes` are unsharded bytes kept by the
    wrapper: gradients waiting for their reduction, gathered parameters not yet freed.
    `device_bytes` are all that the device holds, `device_peak` the most since the sample before;
    both are zero on the host.
    """

    moment: Literal["after_forward", "after_backward"]
    micro_batch: int
    unsharded: tuple[str, ...]
    retained_gradient_bytes: int
    retained_parameter_bytes: int
    device_bytes: int = 0
    device_peak: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Resting:
    """Where a rank's tensors are behind an action: torch's device types, each once, in order.

    `optimizer` is its state without the step counters; empty where there is none. `device_bytes`
    are held on the device then.
    """

    parameters: tuple[str, ...]
    gradients: tuple[str, ...]
    buffers: tuple[str, ...]
    optimizer: tuple[str, ...]
    device_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRecord:
    """One train or poison action on one rank. `gradients` are those before clipping.

    `plan` has the rank's sequence indices per micro-batch. Without a step `norm` (before clipping)
    and `lr` (of the next step) are None; `clipped` (the gradients after the step), `parameters` and
    `optimizer_state` (slot to parts, both after the step) are empty. `metrics` are those that the
    engine reports of the batch, by name. `device_bytes` are held on the device before the action,
    without gradients, and after it, with those that are left.
    """

    kind: Literal["train"] = "train"
    plan: tuple[tuple[int, ...], ...]
    total_loss: float
    gradients: tuple[LocalArray, ...]
    norm: float | None
    stepped: bool
    lr: float | None
    parameters: tuple[LocalArray, ...]
    collectives: tuple[Collective, ...]
    residency: tuple[Residency, ...]
    notes: tuple[str, ...]
    clipped: tuple[LocalArray, ...] = ()
    optimizer_state: OptimizerState = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    copies: tuple[Copy, ...] = ()
    device_bytes: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class InferRecord:
    """One infer action on one rank: per-token losses of its sequences, padded to the longest."""

    kind: Literal["infer"] = "infer"
    token_losses: Array
    collectives: tuple[Collective, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedTensor:
    """One yielded tensor: name, device and value."""

    name: str
    device: str
    value: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleState:
    """What an action that should change nothing must leave as it was."""

    training: bool
    requires_grad: dict[str, bool]
    devices: dict[str, str]
    parameters: tuple[LocalArray, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRecord:
    """One export or resume action on one rank: what was yielded, in order, the state around it.

    `raised` is the class name of the error with which the export refused to go on, else empty.
    """

    kind: Literal["export"] = "export"
    raised: str = ""
    tensors: tuple[ExportedTensor, ...]
    before: ModuleState
    after: ModuleState
    collectives: tuple[Collective, ...]
    copies: tuple[Copy, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRecord:
    """An action on one rank that has nothing else to show, and what it left.

    `raised` is the class name of what came out of an interrupted batch or a checkpoint that is to
    be refused, empty where nothing did; `injected` whether the exception that was put in is it or
    its cause. `copies` are those of a move. `random` is a digest of torch's random state, at a
    save and behind a resume.
    """

    kind: Literal["state"] = "state"
    raised: str = ""
    injected: bool = False
    training: bool
    requires_grad: dict[str, bool]
    parameters: tuple[LocalArray, ...]
    optimizer_state: OptimizerState
    collectives: tuple[Collective, ...]
    copies: tuple[Copy, ...] = ()
    random: str = ""


Record: TypeAlias = TrainRecord | InferRecord | ExportRecord | StateRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One reduction: divide by `before`, sum over `size` ranks of `axis`, divide by `after`.

    Divisions and sums are in the reduce dtype; a factor of 1 is no operation. `fused`: the backend
    multiplies by the rounded inverse of `before`, and may add in a finer dtype.
    """

    axis: Literal["shard", "replicate"]
    size: int
    before: float = 1.0
    after: float = 1.0
    fused: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One wrapped unit: the parameters reduced together. The root's `name` is empty."""

    name: str
    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """The precision contract an engine declares for one case; the oracles hold it to it.

    `deferred`: gradients of all micro-batches are added locally, in `local_accumulate`, and
    reduced once; otherwise each is reduced and the shards are added in `shard_accumulate`.
    `levels` in order. `norm` is the coarsest dtype of the gradient norm. `buffers` is what floating
    buffers are cast to for compute (None: left alone). `input_cast`: every unit casts its floating
    inputs to the compute dtype. `semantics` names a torch wrapper whose list of collectives and
    retained bytes is predicted in full; empty: only what every engine must keep is checked.
    `autocast` is the dtype of an autocast around every forward and its loss (None: there is none).
    `replayable`: local gradients are expected to be bit-equal to a single-process replay. `device`
    is the world's word, not the engine's: torch's name of a device with an arithmetic of its own,
    on which replay calibrates itself; None where the host's is that of the ranks.
    """

    storage: Dtype
    compute: Dtype
    reduce: Dtype
    deferred: bool
    local_accumulate: Dtype
    shard_accumulate: Dtype
    norm: Dtype
    levels: tuple[Level, ...]
    units: tuple[Unit, ...]
    buffers: Dtype | None = None
    input_cast: bool = True
    autocast: Dtype | None = None
    semantics: Literal["fsdp1", "fsdp2", ""] = ""
    replayable: bool = True
    device: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankObservation:
    """What one rank showed.

    `initial` are the parameters before the first action, `training` is the root's mode then and
    `built_bytes` what the device holds. `races` say what was used out of order under a schedule.
    `resting` is where everything is after the build and behind each action, on a device that is
    apart from the host.
    """

    rank: int
    initial: tuple[LocalArray, ...]
    records: tuple[Record, ...]
    build_collectives: tuple[Collective, ...]
    training: bool = True
    device: str = "cpu"
    built_bytes: int = 0
    races: tuple[str, ...] = ()
    resting: tuple[Resting, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What all ranks showed, in rank order, and the numerics the engine declared for the case."""

    numerics: Numerics
    ranks: tuple[RankObservation, ...]

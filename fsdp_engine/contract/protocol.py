"""The seam to an engine: what an adapter implements, what a check may ask.

An engine is a class found by name, built without arguments in every rank process. The controller
never imports it: it asks through a world and gets plain data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, get_args, runtime_checkable

from fsdp_engine.contract.actions import Export
from fsdp_engine.contract.case import Case, Scalar
from fsdp_engine.contract.observation import Numerics, Observation, Placement

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from fsdp_engine.workload.batches import LocalBatch, MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What an engine can do at all, as plain data, for the report.

    `lacks` are combinations that it never supports, by the axes of `properties.covering`: no case
    is drawn in them. `{"strategy": "fsdp1", "mesh": "grid"}` is one, `{"mesh": "column"}` another.
    `without` names those of `contract.actions.ABILITIES` that it has not. `patience` is how many
    times the deadline of a case it needs, for what it does around the same work.
    """

    name: str
    versions: dict[str, str]
    strategies: tuple[str, ...]
    actions: tuple[str, ...]
    lacks: tuple[dict[str, str], ...] = ()
    without: tuple[str, ...] = ()
    patience: float = 1.0


DeviceName: TypeAlias = Literal["cpu", "sim", "cuda"]
DEVICES: tuple[DeviceName, ...] = get_args(DeviceName)
"""What ranks can compute on: the host, the simulated accelerator, or the machine's GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """Where a trainee runs. The default process group spans exactly the case's ranks.

    `device` is torch's name of the rank's device, with an index where there is one. Batches come on
    the host.
    `directory` is a path for the case's checkpoints, the same on all ranks. Nothing is there yet,
    and what is put there is removed with the case.
    """

    rank: int
    world_size: int
    device: str = "cpu"
    directory: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalShard:
    """One rank's part of a named tensor, still a tensor. `data` None: absent."""

    name: str
    full_shape: tuple[int, ...]
    placement: Placement
    data: Tensor | None


EAGER_FALLBACK = "fell back to eager sync"
"""The note of an engine that reduced a deferred batch after every micro-batch instead."""

TokenLoss: TypeAlias = "Callable[[object, MicroBatch], Tensor]"
"""`(module output, micro-batch) -> [sequences, tokens]` per-token losses, fp32 or fp64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """What forward and backward return.

    `total` is the sum of the rank's normalised micro-batch losses: `(1/W) * sum_r total_r` is the
    global loss. `plan` has the rank's sequence indices per micro-batch. `notes` say what the engine
    did differently from what was asked, for example a fall-back to eager sync.
    """

    total: float
    plan: tuple[tuple[int, ...], ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Gradient norm before clipping and whether the optimizer stepped."""

    norm: float
    stepped: bool


class Trainee(Protocol):
    """A built engine on one rank."""

    @property
    def module(self) -> Module:
        """The wrapped root; calling it runs a forward with all of the engine's hooks."""

    def mode(self, which: Literal["train", "eval"]) -> AbstractContextManager[None]: ...

    def zero_grad(self) -> None: ...

    def forward_backward(self, batch: LocalBatch, loss: TokenLoss) -> Losses:
        """Split the rank's batch, run every micro-batch, leave reduced gradients.

        The engine plans the micro-batches, normalises by global counts and multiplies by the
        number of ranks it averages over. Bit-faithful replay assumes the canonical association

            token-mean            sum(token_loss * mask) * (W / N)
            token-sum             sum(token_loss * mask) * W
            seq-mean-token-sum    sum(token_loss * mask) * (W / S)
            seq-mean-token-mean   sum_s(sum_t(token_loss * mask) / n_s) * (W / S)

        with N the global number of loss tokens, S the global number of sequences that have any,
        n_s those of a sequence (a sequence without any contributes zero) and the quotient a
        Python float. An engine that associates otherwise declares `replayable=False`.
        """

    def gradients(self) -> Iterator[LocalShard]:
        """Every parameter of the model by its workload name; `data` None where there is none."""

    def parameters(self) -> Iterator[LocalShard]: ...

    def optimizer_state(self) -> Iterator[tuple[str, LocalShard]]:
        """Slot and this rank's part of it, for every parameter that has state.

        Slots are torch's: `step` (a number, `full_shape` empty), `exp_avg`, `exp_avg_sq`. An engine
        that cannot tell yields nothing, and its optimizer is judged by parameters alone.
        """

    def metrics(self) -> dict[str, float]:
        """What the engine reports of the last batch, over all ranks; called on every rank.

        Names with a meaning here: `loss` (the global loss in the case's mode), `loss_tokens` and
        `sequences` (those of all ranks; sequences that have any loss token). Others are not judged.
        """

    def step(self) -> StepResult:
        """Clip and step; nothing moves where any rank's gradient is not finite.

        Gradients stay, clipped, until they are cleared; after a step that was not taken there are
        none.
        """

    def lr_step(self) -> float:
        """Advance the schedule; the learning rate that the next step will use."""

    def infer(self, batch: LocalBatch, loss: TokenLoss) -> Tensor:
        """Per-token losses `[sequences, longest]` of the rank's batch, without gradients."""

    def export(self, action: Export) -> Iterator[tuple[str, Tensor]]:
        """Full tensors by name; every rank drains it in the same order.

        They are those of the call, whatever happens before they are taken; where that cannot be,
        `EngineStateError` is raised instead of going on.
        """

    def disable_adapter(self) -> AbstractContextManager[None]:
        """Inside, forwards run without the adapter."""

    def merge_adapter(self) -> AbstractContextManager[None]:
        """Inside, the adapter is added to the weights; they come back on every way out."""

    def freeze(self, names: tuple[str, ...]) -> None:
        """The parameters of these workload names take no gradient from now on."""

    def unfreeze(self, names: tuple[str, ...]) -> None:
        """They take gradients and are stepped from now on; `ConfigError` where that cannot be."""

    def restore(self, parameters: tuple[LocalShard, ...]) -> None:
        """Write this rank's parts, as `parameters` gave them, back in place."""


@runtime_checkable
class Checkpointing(Protocol):
    """What a trainee has as well when its engine offers the actions `CHECKPOINT_ACTIONS`."""

    def save(self, path: str, *, max_to_keep: int | None = None) -> object:
        """Save the next checkpoint below `path`: all that a trainee built anew needs to go on.

        Of all checkpoints below, the newest `max_to_keep` stay.
        """

    def load(self, path: str) -> object:
        """Go on from the newest checkpoint below `path`, whatever mesh and strategy saved it.

        Raises `CheckpointError` on every rank, with nothing touched, where it is not whole.
        """


@runtime_checkable
class Offloading(Protocol):
    """What a trainee has as well when its engine offers the actions `OFFLOAD_ACTIONS`."""

    def to(self, device: str, *, model: bool, optimizer: bool, grad: bool) -> None:
        """Move these to the host, `cpu`, or to the rank's device, where they rest from then on.

        Whatever uses them brings them to the device meanwhile. `grad` is as `model`.
        """


class Engine(Protocol):
    """The system under test."""

    def capabilities(self) -> Capabilities: ...

    def supports(self, case: Case) -> str | None:
        """None, or the reason in words why the case does not apply to this engine."""

    def numerics(self, case: Case) -> Numerics: ...

    def defaults(self) -> dict[str, dict[str, Scalar]]:
        """Entry point (`dataclass`, `yaml`, ...) to flat field name to default value."""

    def mesh_shape(self, world_size: int, fsdp_size: int) -> tuple[int, ...]:
        """The mesh the engine makes of its size option.

        Raises `ConfigError` where it refuses, `UnsupportedCase` where it has no such option.
        """

    def strategy(self, mesh_ndim: int, *, zero3: bool) -> str:
        """The sharding strategy's name. Raises `NotImplementedError` naming another ndim."""

    def build(self, case: Case, rank: RankContext) -> Trainee:
        """Build the trainee from `workload.models.build_model(case)`.

        Raises `ConfigError` before any collective, on every rank, for a refused configuration, and
        so `UnsupportedCase` where the engine cannot run on the rank's device.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A table entry: a value, or the class name and message of the exception it raised."""

    value: str | tuple[int, ...] | None
    error_kind: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTables:
    """An engine's answers to questions that need no ranks.

    `mesh_shapes` answers the `(world_size, fsdp_size)` pairs asked, in order; `strategies` the
    `(mesh_ndim, zero3)` pairs.
    """

    capabilities: Capabilities
    defaults: dict[str, dict[str, Scalar]]
    mesh_shapes: tuple[Answer, ...]
    strategies: tuple[Answer, ...]


class Run(Protocol):
    """How a check reaches ranks. `run(case)` returns the observation or raises a `RunError`."""

    def __call__(self, case: Case) -> Observation: ...

    def tables(
        self,
        *,
        mesh_shapes: tuple[tuple[int, int], ...] = (),
        strategies: tuple[tuple[int, bool], ...] = (),
    ) -> EngineTables: ...

"""What a program is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from fsdp_engine.contract.limits import (
    MAX_ACTIONS,
    MAX_NUM_TENSORS,
    MAX_SEQUENCES,
    require,
    require_between,
)
from fsdp_engine.contract.model import Part


@dataclass(frozen=True, slots=True, kw_only=True)
class Train:
    """Forward and backward over one global batch, then an optimizer step where `step` says so."""

    kind: Literal["train"] = "train"
    batch: int = 0
    step: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Infer:
    """A forward in eval mode over one global batch.

    Of a model with an adapter: as it is (`on`), as if it had none (`off`), or with the adapter
    added to the weights meanwhile (`merged`).
    """

    kind: Literal["infer"] = "infer"
    batch: int = 0
    adapter: Literal["on", "off", "merged"] = "on"


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """Weight export. `auto` lets the engine stage, `force` stages, `skip` does not.

    `weights`: the state dict of the model as it was wrapped (`all`); of a model with an adapter
    that of the model without it, as it is (`base`) or with the adapter added to it (`merged`); or
    the adapter alone, by the names of peft's files (`adapter`), with `layered` a unit at a time.
    `unfuse`: experts one by one, by the names of published checkpoints.

    The consumer takes `after` tensors and then closes the export (`close`), raises (`raise`), or
    goes on to other actions (`hold`), a resume among them that takes the rest; `full` takes all.
    """

    kind: Literal["export"] = "export"
    staging: Literal["auto", "force", "skip"] = "auto"
    weights: Literal["all", "base", "adapter", "merged"] = "all"
    layered: bool = False
    unfuse: bool = False
    drain: Literal["full", "close", "raise", "hold"] = "full"
    after: int = 0

    def __post_init__(self) -> None:
        is_partial = self.drain != "full"
        require_between("export.after", self.after, 0, MAX_NUM_TENSORS if is_partial else 0)
        if self.layered:
            require(self.weights == "adapter", "export.layered", self.layered, "adapters only")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """The consumer takes what an export that was held has left."""

    kind: Literal["resume"] = "resume"


@dataclass(frozen=True, slots=True, kw_only=True)
class Poison:
    """A training action with a step in which one rank's loss is not finite.

    The losses of the sequence at place `sequence` of rank `rank` are multiplied by `value`.
    """

    kind: Literal["poison"] = "poison"
    batch: int = 0
    rank: int = 0
    sequence: int = 0
    value: Literal["nan", "inf"] = "nan"


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupt:
    """Forward and backward that an exception ends on all ranks, in micro-batch `micro_batch`.

    `forward`: behind the root's forward. `loss`: in the loss function. `backward`: at the gradient
    of the first unit's output that has one, when later units are through. In a batch of fewer
    micro-batches nothing is raised.
    """

    kind: Literal["interrupt"] = "interrupt"
    batch: int = 0
    phase: Literal["forward", "loss", "backward"] = "loss"
    micro_batch: int = 0

    def __post_init__(self) -> None:
        require_between("interrupt.micro_batch", self.micro_batch, 0, MAX_SEQUENCES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Eval:
    """Enter and leave eval mode."""

    kind: Literal["eval"] = "eval"


@dataclass(frozen=True, slots=True, kw_only=True)
class Freeze:
    """Parameters stop taking gradients; `half` is every second one in the model's order."""

    kind: Literal["freeze"] = "freeze"
    part: Part = "first_unit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfreeze:
    """Parameters that were frozen take gradients."""

    kind: Literal["unfreeze"] = "unfreeze"
    part: Part = "first_unit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """The parameters of the start are written back in place; the optimizer stays as it is."""

    kind: Literal["restore"] = "restore"


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """A checkpoint is saved; `max_to_keep` of them stay, 0 for all."""

    kind: Literal["save"] = "save"
    max_to_keep: int = 0

    def __post_init__(self) -> None:
        require_between("save.max_to_keep", self.max_to_keep, 0, MAX_ACTIONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The newest checkpoint is loaded: into the trainee as it is, or `fresh` into a new one.

    A new one may be built by another `strategy` and on another mesh of as many ranks, `shape`;
    empty is that from before.
    """

    kind: Literal["load"] = "load"
    fresh: bool = False
    strategy: Literal["", "fsdp2", "fsdp1"] = ""
    shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        other = bool(self.strategy or self.shape)
        require(self.fresh or not other, "load.fresh", self.fresh, "true on another mesh")


Damage: TypeAlias = Literal["truncated", "flipped", "missing", "foreign"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reject:
    """A damaged copy of the newest checkpoint is to be loaded, which must be refused.

    One of its files, number `file` of them in order and from the first again, is cut to a half, has
    a bit flipped in its middle, or is gone; or all of them are `foreign` files of the same names.
    """

    kind: Literal["reject"] = "reject"
    damage: Damage = "truncated"
    file: int = 0

    def __post_init__(self) -> None:
        require_between("reject.file", self.file, 0, MAX_ACTIONS)


Action: TypeAlias = (
    Train
    | Infer
    | Export
    | Resume
    | Poison
    | Interrupt
    | Eval
    | Freeze
    | Unfreeze
    | Restore
    | Save
    | Load
    | Reject
)
ACTIONS = (
    "train",
    "infer",
    "export",
    "resume",
    "poison",
    "interrupt",
    "eval",
    "freeze",
    "unfreeze",
    "restore",
    "save",
    "load",
    "reject",
)
"""The kinds of all actions."""

CHECKPOINT_ACTIONS = ("save", "load", "reject")
"""The kinds of those that need a trainee with checkpoints."""

ABILITIES: dict[str, str] = {
    "adapter": "exports of the base, the adapter or merged weights, and of experts one by one, and "
    "inference without the adapter or with it merged",
    "reshard": "checkpoints loaded on another mesh or by another strategy",
}
"""What an action may need beyond its kind, in words."""

BATCH_ACTIONS = (Train, Infer, Poison, Interrupt)
"""The actions that run over a batch."""


def ability_for(action: Action) -> str | None:
    """The one of `ABILITIES` that an action needs, if any."""
    match action:
        case Export():
            return "adapter" if action.weights != "all" or action.unfuse else None
        case Infer():
            return "adapter" if action.adapter != "on" else None
        case Load():
            return "reshard" if action.strategy or action.shape else None
        case _:
            return None


def asks_for_step(action: Action) -> bool:
    """Whether it ends with an optimizer step, taken or not, and a step of the schedule."""
    return isinstance(action, Poison) or (isinstance(action, Train) and action.step)

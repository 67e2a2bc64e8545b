"""A case: one training run described as frozen, hashable data that survives a JSON round trip.

Defaults are the simplest legal value of each field; shrinking ends at them. A case that exists is
legal: every rule is checked when it is built, and the error names the field and the value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from fsdp_engine.contract.limits import (
    MAX_ACTIONS,
    MAX_BATCHES,
    MAX_LENGTH,
    MAX_NUMBER,
    MAX_SEQUENCES,
    MAX_WORLD_SIZE,
    require,
    require_between,
)
from fsdp_engine.contract.model import Model

Dtype: TypeAlias = Literal["float64", "float32", "bfloat16", "float16"]
Strategy: TypeAlias = Literal["fsdp2", "fsdp1"]
ConfigSource: TypeAlias = Literal["dataclass", "yaml", "legacy"]
LossMode: TypeAlias = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean"
]
Scalar: TypeAlias = str | int | float | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Extents of the device mesh: `(shards,)` or `(replicas, shards)`, ranks in row-major order.

    A 2-D mesh with an extent of one is a mesh of its own: engines take other code paths there.
    """

    shape: tuple[int, ...] = (2,)

    def __post_init__(self) -> None:
        require(len(self.shape) in (1, 2), "mesh.shape", self.shape, "legal is one or two extents")
        in_range = all(1 <= n <= MAX_WORLD_SIZE for n in self.shape)
        require(in_range, "mesh.shape", self.shape, f"extents are 1 to {MAX_WORLD_SIZE}")
        require_between("mesh world size", self.world_size, 1, MAX_WORLD_SIZE)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def world_size(self) -> int:
        return math.prod(self.shape)

    @property
    def replicas(self) -> int:
        return self.shape[0] if self.ndim == 2 else 1

    @property
    def shards(self) -> int:
        return self.shape[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class DtypePolicy:
    """Dtypes of the stored parameters, of forward and backward, and of the gradient reduction."""

    storage: Dtype = "float32"
    compute: Dtype = "float32"
    reduce: Dtype = "float32"

    @property
    def mixed(self) -> bool:
        return not self.storage == self.compute == self.reduce


DTYPE_POLICIES: dict[str, DtypePolicy] = {
    "fp32": DtypePolicy(),
    "fp64": DtypePolicy(storage="float64", compute="float64", reduce="float64"),
    "fp32/bf16/fp32": DtypePolicy(compute="bfloat16"),
    "fp32/bf16/bf16": DtypePolicy(compute="bfloat16", reduce="bfloat16"),
    "bf16/bf16/fp32": DtypePolicy(storage="bfloat16", compute="bfloat16"),
}
"""The policies the suites draw from, by name storage/compute/reduce; the simplest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Static:
    """Micro-batches of a fixed number of sequences, in order."""

    kind: Literal["static"] = "static"
    sequences: int = 1

    def __post_init__(self) -> None:
        require_between("planning.sequences", self.sequences, 1, MAX_SEQUENCES)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBudget:
    """Micro-batches planned by tokens: ranks agree on the largest count any of them needs."""

    kind: Literal["token_budget"] = "token_budget"
    max_tokens: int = 8

    def __post_init__(self) -> None:
        require_between("planning.max_tokens", self.max_tokens, 1, MAX_LENGTH * MAX_SEQUENCES)


Planning: TypeAlias = Static | TokenBudget


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What the case asks of the engine, in the words of the field.

    `deferred` is gradient sync only at the last micro-batch. `config_source` is the entry point
    the engine's configuration comes from; `legacy` is a configuration object without the field
    that switches deferral, which means deferred. `overrides` are raw configuration fields set last
    (dotted names for nested ones), for the checks on the configuration itself.
    """

    strategy: Strategy = "fsdp2"
    reshard_after_forward: bool = True
    deferred: bool = False
    config_source: ConfigSource = "dataclass"
    planning: Planning = field(default_factory=Static)
    loss_mode: LossMode = "token-mean"
    overrides: tuple[tuple[str, Scalar], ...] = ()

    def __post_init__(self) -> None:
        if self.config_source == "legacy":
            require(self.deferred, "engine.deferred", self.deferred, "legacy means deferred")
        names = [name for name, _ in self.overrides]
        require(len(set(names)) == len(names), "engine.overrides", names, "each field once")
        require(len(names) <= 16, "engine.overrides", len(names), "at most 16")
        for name, value in self.overrides:
            legal = not isinstance(value, (int, float)) or abs(value) < MAX_NUMBER
            require(legal, f"engine.overrides {name}", value, f"finite, below {MAX_NUMBER:.0e}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """One sequence: `key` names its content, `loss_tokens` of its `length` tokens carry loss.

    `gated` sequences use the model's optional part. Moving a sequence to another rank or
    micro-batch keeps its content.
    """

    key: int
    length: int = 2
    loss_tokens: int = 1
    gated: bool = True

    def __post_init__(self) -> None:
        require_between("sequence.key", self.key, 0, 1 << 20)
        require_between("sequence.length", self.length, 1, MAX_LENGTH)
        require_between("sequence.loss_tokens", self.loss_tokens, 0, self.length)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One global batch: for every rank the sequences it holds."""

    ranks: tuple[tuple[Sequence, ...], ...]

    def __post_init__(self) -> None:
        require_between("batch.ranks", len(self.ranks), 1, MAX_WORLD_SIZE)
        for rank, sequences in enumerate(self.ranks):
            require_between(f"batch.ranks[{rank}] length", len(sequences), 1, MAX_SEQUENCES)
        keys = [sequence.key for sequence in self.sequences]
        require(len(set(keys)) == len(keys), "batch keys", sorted(keys), "each key once")
        require(self.loss_tokens > 0, "batch.loss_tokens", 0, "some token carries loss")

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        return tuple(sequence for rank in self.ranks for sequence in rank)

    @property
    def loss_tokens(self) -> int:
        return sum(sequence.loss_tokens for sequence in self.sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """Optimizer and schedule. `lr` and `weight_decay` are exactly representable by default."""

    kind: Literal["sgd", "adamw"] = "sgd"
    lr: float = 0.125
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        for name in ("lr", "weight_decay", "clip_grad"):
            value = getattr(self, name)
            require(math.isfinite(value) and value >= 0, f"optimizer.{name}", value, "finite, >= 0")
        require_between("optimizer.warmup_steps", self.warmup_steps, 0, 1 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Train:
    """Forward and backward over one global batch, then an optimizer step where `step` says so."""

    kind: Literal["train"] = "train"
    batch: int = 0
    step: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Infer:
    """A forward in eval mode over one global batch."""

    kind: Literal["infer"] = "infer"
    batch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """Weight export. `auto` lets the engine stage, `force` stages, `skip` does not."""

    kind: Literal["export"] = "export"
    staging: Literal["auto", "force", "skip"] = "auto"


Action: TypeAlias = Train | Infer | Export


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One training run. `exact` asks for dyadic weights and data, so that sums are exact."""

    mesh: Mesh = field(default_factory=Mesh)
    model: Model = field(default_factory=Model)
    dtypes: DtypePolicy = field(default_factory=DtypePolicy)
    engine: EngineOptions = field(default_factory=EngineOptions)
    optimizer: Optimizer = field(default_factory=Optimizer)
    batches: tuple[Batch, ...]
    program: tuple[Action, ...] = (Train(),)
    exact: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        require_between("case.seed", self.seed, 0, (1 << 31) - 1)
        require_between("case.batches length", len(self.batches), 1, MAX_BATCHES)
        require_between("case.program length", len(self.program), 1, MAX_ACTIONS)
        for batch in self.batches:
            require(
                len(batch.ranks) == self.mesh.world_size,
                "batch.ranks",
                len(batch.ranks),
                f"one entry per rank of {self.mesh.shape}",
            )
            self._require_plannable(batch)
        for action in self.program:
            if not isinstance(action, Export):
                require_between("action.batch", action.batch, 0, len(self.batches) - 1)
        if self.exact:
            require(not self.model.is_language, "case.exact", self.exact, "torch families only")
            require(not self.model.lora_rank, "case.exact", self.exact, "without an adapter only")

    def _require_plannable(self, batch: Batch) -> None:
        planning = self.engine.planning
        if isinstance(planning, Static):
            counts = {len(rank) for rank in batch.ranks}
            require(
                len(counts) == 1 and counts.pop() % planning.sequences == 0,
                "batch.ranks",
                [len(rank) for rank in batch.ranks],
                f"equal on all ranks and a multiple of planning.sequences={planning.sequences}",
            )
        else:
            longest = max(sequence.length for sequence in batch.sequences)
            require(
                longest <= planning.max_tokens,
                "planning.max_tokens",
                planning.max_tokens,
                f"at least the longest sequence, {longest}",
            )

    @property
    def loss(self) -> Literal["squared", "cross_entropy"]:
        """The per-token loss: a polynomial where values must stay dyadic or there are no tokens."""
        return "cross_entropy" if self.model.takes_tokens and not self.exact else "squared"


def literal_values(alias: object) -> tuple[str, ...]:
    """The strings of one of the `Literal` aliases above, simplest first."""
    return get_args(alias)

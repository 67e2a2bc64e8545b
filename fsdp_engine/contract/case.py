"""A case: one training run described as frozen, hashable data that survives a JSON round trip.

Defaults are the simplest legal value of each field; shrinking ends at them. A case that exists is
legal: every rule is checked when it is built, and the error names the field and the value.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from fsdp_engine.contract.codec import decode, encode
from fsdp_engine.contract.errors import CaseError

Dtype: TypeAlias = Literal["float64", "float32", "bfloat16", "float16"]
Strategy: TypeAlias = Literal["fsdp2", "fsdp1"]
ConfigSource: TypeAlias = Literal["dataclass", "yaml", "legacy"]
LossMode: TypeAlias = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean"
]
Family: TypeAlias = Literal["linear", "mlp", "embedding", "llama", "qwen2", "mixtral"]
Frozen: TypeAlias = Literal["none", "first_unit", "biases"]
OptionalPart: TypeAlias = Literal["none", "parameter", "unit"]
Scalar: TypeAlias = str | int | float | bool | None

TORCH_FAMILIES: tuple[Family, ...] = ("linear", "mlp", "embedding")
LANGUAGE_FAMILIES: tuple[Family, ...] = ("llama", "qwen2", "mixtral")

MAX_WORLD_SIZE = 64
MAX_UNITS = 8
MAX_WIDTH = 256
MAX_VOCAB = 1024
MAX_LENGTH = 256
MAX_SEQUENCES = 64
MAX_BATCHES = 8
MAX_ACTIONS = 16


def _require(condition: bool, field_name: str, value: object, legal: str) -> None:  # noqa: FBT001
    if not condition:
        raise CaseError(f"{field_name}: {value!r} is not legal; {legal}")


def _require_between(field_name: str, value: int, low: int, high: int) -> None:
    _require(low <= value <= high, field_name, value, f"legal is {low} to {high}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Extents of the device mesh: `(shards,)` or `(replicas, shards)`, ranks in row-major order.

    A 2-D mesh with an extent of one is a mesh of its own: engines take other code paths there.
    """

    shape: tuple[int, ...] = (2,)

    def __post_init__(self) -> None:
        _require(len(self.shape) in (1, 2), "mesh.shape", self.shape, "legal is one or two extents")
        _require(all(n >= 1 for n in self.shape), "mesh.shape", self.shape, "extents are >= 1")
        _require_between("mesh world size", self.world_size, 1, MAX_WORLD_SIZE)

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
        _require_between("planning.sequences", self.sequences, 1, MAX_SEQUENCES)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBudget:
    """Micro-batches planned by tokens: ranks agree on the largest count any of them needs."""

    kind: Literal["token_budget"] = "token_budget"
    max_tokens: int = 8

    def __post_init__(self) -> None:
        _require_between("planning.max_tokens", self.max_tokens, 1, MAX_LENGTH * MAX_SEQUENCES)


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
            _require(self.deferred, "engine.deferred", self.deferred, "legacy means deferred")
        names = [name for name, _ in self.overrides]
        _require(len(set(names)) == len(names), "engine.overrides", names, "each field once")
        _require(len(names) <= 16, "engine.overrides", len(names), "at most 16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The model to build: `units` wrapped blocks and a root that owns everything else.

    `linear`: blocks of one square layer over drawn features. `mlp`: residual blocks of two layers.
    `embedding`: the same over an embedding, with a head that may be tied to it. The language
    families are the ones of `transformers`, built from a config. `optional` is what only gated
    sequences use: a `parameter` inside the last unit or the last `unit` itself.
    `lora_rank` 0 is no adapter; else every linear layer of the units gets one, A and B non-zero.
    """

    family: Family = "linear"
    units: int = 1
    width: int = 4
    hidden: int = 4
    vocab: int = 4
    bias: bool = False
    tied: bool = False
    frozen: Frozen = "none"
    buffers: bool = False
    optional: OptionalPart = "none"
    lora_rank: int = 0
    lora_alpha: int = 2

    def __post_init__(self) -> None:
        _require_between("model.units", self.units, 1, MAX_UNITS)
        _require_between("model.width", self.width, 1, MAX_WIDTH)
        _require_between("model.hidden", self.hidden, 1, MAX_WIDTH)
        _require_between("model.vocab", self.vocab, 1, MAX_VOCAB)
        _require_between("model.lora_rank", self.lora_rank, 0, 64)
        _require_between("model.lora_alpha", self.lora_alpha, 0, 1024)
        if self.family in LANGUAGE_FAMILIES:
            plain = self.optional == "none" and not self.buffers and not self.bias
            _require(
                plain, "model", self, "optional, buffers and bias belong to the torch families"
            )
            _require(self.width % 4 == 0, "model.width", self.width, "language: a multiple of 4")
            _require(self.frozen != "biases", "model.frozen", self.frozen, "language: no biases")
        if self.tied:
            _require(
                self.family not in ("linear", "mlp"),
                "model.tied",
                self.tied,
                f"{self.family} has no embedding to tie",
            )
        if self.frozen == "biases":
            _require(self.bias, "model.frozen", self.frozen, "biases are frozen where bias is on")
        if self.lora_rank:
            _require(
                self.frozen == "none" and self.optional == "none",
                "model.lora_rank",
                self.lora_rank,
                "an adapter freezes the base itself; frozen and optional stay none",
            )

    @property
    def is_language(self) -> bool:
        return self.family in LANGUAGE_FAMILIES

    @property
    def takes_tokens(self) -> bool:
        return self.family not in ("linear", "mlp")


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
        _require_between("sequence.key", self.key, 0, 1 << 20)
        _require_between("sequence.length", self.length, 1, MAX_LENGTH)
        _require_between("sequence.loss_tokens", self.loss_tokens, 0, self.length)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One global batch: for every rank the sequences it holds."""

    ranks: tuple[tuple[Sequence, ...], ...]

    def __post_init__(self) -> None:
        _require_between("batch.ranks", len(self.ranks), 1, MAX_WORLD_SIZE)
        for rank, sequences in enumerate(self.ranks):
            _require_between(f"batch.ranks[{rank}] length", len(sequences), 1, MAX_SEQUENCES)
        keys = [sequence.key for sequence in self.sequences]
        _require(len(set(keys)) == len(keys), "batch keys", sorted(keys), "each key once")
        _require(self.loss_tokens > 0, "batch.loss_tokens", 0, "some token carries loss")

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
            _require(
                math.isfinite(value) and value >= 0, f"optimizer.{name}", value, "finite, >= 0"
            )
        _require_between("optimizer.warmup_steps", self.warmup_steps, 0, 1 << 20)


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
        _require_between("case.seed", self.seed, 0, (1 << 31) - 1)
        _require_between("case.batches length", len(self.batches), 1, MAX_BATCHES)
        _require_between("case.program length", len(self.program), 1, MAX_ACTIONS)
        for batch in self.batches:
            _require(
                len(batch.ranks) == self.mesh.world_size,
                "batch.ranks",
                len(batch.ranks),
                f"one entry per rank of {self.mesh.shape}",
            )
            self._require_plannable(batch)
        for action in self.program:
            if not isinstance(action, Export):
                _require_between("action.batch", action.batch, 0, len(self.batches) - 1)
        if self.exact:
            _require(not self.model.is_language, "case.exact", self.exact, "torch families only")
            _require(not self.model.lora_rank, "case.exact", self.exact, "without an adapter only")

    def _require_plannable(self, batch: Batch) -> None:
        planning = self.engine.planning
        if isinstance(planning, Static):
            counts = {len(rank) for rank in batch.ranks}
            _require(
                len(counts) == 1 and counts.pop() % planning.sequences == 0,
                "batch.ranks",
                [len(rank) for rank in batch.ranks],
                f"equal on all ranks and a multiple of planning.sequences={planning.sequences}",
            )
        else:
            longest = max(sequence.length for sequence in batch.sequences)
            _require(
                longest <= planning.max_tokens,
                "planning.max_tokens",
                planning.max_tokens,
                f"at least the longest sequence, {longest}",
            )

    @property
    def loss(self) -> Literal["squared", "cross_entropy"]:
        """The per-token loss: a polynomial where values must stay dyadic or there are no tokens."""
        return "cross_entropy" if self.model.takes_tokens and not self.exact else "squared"


def canonical_json(case: Case) -> str:
    """The case as one line of JSON with sorted keys; equal cases give equal text."""
    return json.dumps(encode(case), sort_keys=True, separators=(",", ":"), allow_nan=False)


def case_id(case: Case) -> str:
    """SHA-256 of the canonical JSON, in hexadecimal; engine and device are not part of it."""
    return hashlib.sha256(canonical_json(case).encode()).hexdigest()


MAX_CASE_BYTES = 1 << 20


def case_from_json(text: str) -> Case:
    """Read a case.

    Raises:
        CaseError: not JSON, too large, an unknown or missing field, a wrong type or an illegal
            value; the message names the field.
    """
    if len(text) > MAX_CASE_BYTES:
        raise CaseError(f"case file: {len(text)} characters; legal is at most {MAX_CASE_BYTES}")
    try:
        raw = json.loads(text, parse_constant=_refuse_constant)
    except CaseError:
        raise
    except (ValueError, RecursionError) as error:  # a number of too many digits is a ValueError
        raise CaseError(f"case file: not JSON ({error})") from error
    return decode(Case, raw, where="case")


def _refuse_constant(name: str) -> float:
    raise CaseError(f"case file: {name} is not a number; legal is a finite one")


def literal_values(alias: object) -> tuple[str, ...]:
    """The strings of one of the `Literal` aliases above, simplest first."""
    return get_args(alias)

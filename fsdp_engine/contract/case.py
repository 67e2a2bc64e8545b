"""A case: one training run described as frozen, hashable data that survives a JSON round trip.

Defaults are the simplest legal value of each field; shrinking ends at them. A case that exists is
legal: every rule is checked when it is built, and the error names the field and the value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias, get_args

from fsdp_engine.contract.actions import (
    BATCH_ACTIONS,
    Action,
    Export,
    Freeze,
    Infer,
    Load,
    Move,
    Poison,
    Reject,
    Resume,
    Save,
    Train,
    Unfreeze,
)
from fsdp_engine.contract.batch import Batch, Planning, Static
from fsdp_engine.contract.limits import (
    MAX_ACTIONS,
    MAX_BATCHES,
    MAX_NUMBER,
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
class EngineOptions:
    """What the case asks of the engine, in the words of the field.

    `deferred` is gradient sync only at the last micro-batch. `config_source` is the entry point
    the engine's configuration comes from; `legacy` is a configuration object without the field
    that switches deferral, which means deferred. `overrides` are raw configuration fields set last
    (dotted names for nested ones), for the checks on the configuration itself; the strings `.nan`,
    `.inf` and `-.inf` stand for the numbers, as in YAML, for JSON has none of them.

    `param_offload` and `optimizer_offload`: parameters, and the optimizer's state, rest on the host
    where the device is another; `offload_policy` is FSDP2's own way to keep both there.
    """

    strategy: Strategy = "fsdp2"
    reshard_after_forward: bool = True
    deferred: bool = False
    config_source: ConfigSource = "dataclass"
    planning: Planning = field(default_factory=Static)
    loss_mode: LossMode = "token-mean"
    param_offload: bool = False
    optimizer_offload: bool = False
    offload_policy: bool = False
    overrides: tuple[tuple[str, Scalar], ...] = ()

    def __post_init__(self) -> None:
        if self.config_source == "legacy":
            require(self.deferred, "engine.deferred", self.deferred, "legacy means deferred")
        if self.offload_policy:
            require(self.strategy == "fsdp2", "engine.offload_policy", "on", "under fsdp2 only")
            by_flags = self.param_offload or self.optimizer_offload
            require(not by_flags, "engine.offload_policy", "on", "without the other two")
        names = [name for name, _ in self.overrides]
        require(len(set(names)) == len(names), "engine.overrides", names, "each field once")
        require(len(names) <= 16, "engine.overrides", len(names), "at most 16")
        for name, value in self.overrides:
            legal = not isinstance(value, (int, float)) or abs(value) < MAX_NUMBER
            require(legal, f"engine.overrides {name}", value, f"finite, below {MAX_NUMBER:.0e}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """Optimizer and schedule. `lr` and `weight_decay` are exactly representable by default.

    With `t` the number of schedule steps so far, the learning rate is `lr` times

        t / warmup_steps                                           while t < warmup_steps
        1                                                          constant
        max(m, (1 + m) / 2 + (1 - m) / 2 * cos(pi * p))            cosine

    with `m` = `min_lr_ratio` and `p` = (t - warmup_steps) / max(1, total_steps - warmup_steps).
    AdamW has betas 0.9 and 0.999 and epsilon 1e-8; SGD has no momentum.
    """

    kind: Literal["sgd", "adamw"] = "sgd"
    lr: float = 0.125
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    warmup_steps: int = 0
    schedule: Literal["constant", "cosine"] = "constant"
    total_steps: int = 8
    min_lr_ratio: float = 0.0

    def __post_init__(self) -> None:
        for name in ("lr", "weight_decay", "clip_grad", "min_lr_ratio"):
            value = getattr(self, name)
            require(math.isfinite(value) and value >= 0, f"optimizer.{name}", value, "finite, >= 0")
        ratio = self.min_lr_ratio
        require(ratio <= 1, "optimizer.min_lr_ratio", ratio, "at most 1")
        require_between("optimizer.warmup_steps", self.warmup_steps, 0, 1 << 20)
        require_between("optimizer.total_steps", self.total_steps, 1, 1 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One training run.

    `exact` asks for dyadic weights and data, so that sums are exact. With a `schedule`, a seed, a
    device that has streams is asynchronous: what does not wait for other work finds poison or luck.
    """

    mesh: Mesh = field(default_factory=Mesh)
    model: Model = field(default_factory=Model)
    dtypes: DtypePolicy = field(default_factory=DtypePolicy)
    engine: EngineOptions = field(default_factory=EngineOptions)
    optimizer: Optimizer = field(default_factory=Optimizer)
    batches: tuple[Batch, ...]
    program: tuple[Action, ...] = (Train(),)
    exact: bool = False
    seed: int = 0
    schedule: int | None = None

    def __post_init__(self) -> None:
        require_between("case.seed", self.seed, 0, (1 << 31) - 1)
        if self.schedule is not None:
            require_between("case.schedule", self.schedule, 0, (1 << 31) - 1)
        require_between("case.batches length", len(self.batches), 1, MAX_BATCHES)
        require_between("case.program length", len(self.program), 1, MAX_ACTIONS)
        for batch in self.batches:
            require(
                len(batch.ranks) == self.mesh.world_size,
                "batch.ranks",
                len(batch.ranks),
                f"one entry per rank of mesh.shape {self.mesh.shape}",
            )
            self._require_plannable(batch)
        for action in self.program:
            self._require_legal(action)
        self._require_one_frozen_part()
        self._require_saved_before()
        self._require_held()
        if self.engine.offload_policy:
            self._require_fixed()
        if self.exact:
            require(not self.model.is_language, "case.exact", self.exact, "torch families only")
            require(not self.model.lora_rank, "case.exact", self.exact, "without an adapter only")

    def _require_legal(self, action: Action) -> None:
        if isinstance(action, BATCH_ACTIONS):
            require_between("action.batch", action.batch, 0, len(self.batches) - 1)
        if isinstance(action, Poison):
            require_between("poison.rank", action.rank, 0, self.mesh.world_size - 1)
            held = len(self.batches[action.batch].ranks[action.rank])
            require_between("poison.sequence", action.sequence, 0, held - 1)
        if isinstance(action, Export) and not self.model.lora_rank:
            require(action.weights == "all", "export.weights", action.weights, "with an adapter")
        if isinstance(action, Infer) and action.adapter != "on":
            possible = self.model.can_merge_in_place or action.adapter == "off"
            legal = "an adapter, and to merge it none on both places of a tied pair"
            require(bool(self.model.lora_rank) and possible, "infer.adapter", action.adapter, legal)

    def _require_held(self) -> None:
        """At most one export is held at a time, and only what is held is resumed."""
        held = False
        for action in self.program:
            if isinstance(action, Export) and action.drain == "hold":
                require(not held, "export.drain", action.drain, "one export is held already")
                held = True
            if isinstance(action, Resume):
                require(held, "resume", action, "an export that is held comes before")
                held = False
            if isinstance(action, Move):
                require(not held, "move", action, "while no export is held")

    def _require_fixed(self) -> None:
        """FSDP2's own policy has the last word on where things are."""
        for action in self.program:
            if isinstance(action, Export):
                legal = action.staging != "force"
                require(legal, "export.staging", action.staging, "auto or skip, offload_policy")
            if isinstance(action, Load):
                legal = action.strategy != "fsdp1"
                require(legal, "load.strategy", action.strategy, "fsdp2, offload_policy")
            require(not isinstance(action, Move), "move", action, "not with offload_policy")

    def _require_one_frozen_part(self) -> None:
        """What is frozen changes one part at a time, so that something always trains."""
        frozen: str = self.model.frozen
        for action in self.program:
            if not isinstance(action, Freeze | Unfreeze):
                continue
            require(not self.model.lora_rank, f"{action.kind}.part", action.part, "no adapter")
            if action.part == "biases":
                require(self.model.bias, f"{action.kind}.part", action.part, "where bias is on")
            legal = "none" if isinstance(action, Freeze) else action.part
            require(frozen == legal, action.kind, action.part, f"frozen before is {legal}")
            frozen = action.part if isinstance(action, Freeze) else "none"

    def _require_saved_before(self) -> None:
        """What is loaded was saved, on a mesh that there is; nothing is frozen in between."""
        saved = False
        kinds = [action.kind for action in self.program]
        for action in self.program:
            saved |= isinstance(action, Save)
            if not isinstance(action, Load | Reject):
                continue
            require(saved, "case.program", kinds, f"a save before a {action.kind}")
            changes = "freeze" in kinds or "unfreeze" in kinds
            require(
                not changes, "case.program", kinds, f"nothing frozen where there is {action.kind}"
            )
            if isinstance(action, Load) and action.shape:
                mesh, here = Mesh(shape=action.shape), self.mesh.world_size
                require(mesh.world_size == here, "load.shape", action.shape, f"{here} ranks")

    def _require_plannable(self, batch: Batch) -> None:
        planning = self.engine.planning
        grouped = all(len(rank) % planning.group == 0 for rank in batch.ranks)
        sizes = [len(rank) for rank in batch.ranks]
        require(grouped, "batch.ranks", sizes, f"multiples of planning.group={planning.group}")
        if isinstance(planning, Static):
            counts = {len(rank) for rank in batch.ranks}
            require(
                len(counts) == 1 and counts.pop() % planning.sequences == 0,
                "batch.ranks",
                [len(rank) for rank in batch.ranks],
                f"equal on all ranks and a multiple of planning.sequences={planning.sequences}",
            )
        else:
            longest = max(
                sum(sequence.length for sequence in rank[start : start + planning.group])
                for rank in batch.ranks
                for start in range(0, len(rank), planning.group)
            )
            require(
                longest <= planning.max_tokens,
                "planning.max_tokens",
                planning.max_tokens,
                f"at least the longest group of sequences, {longest}",
            )

    @property
    def loss(self) -> Literal["squared", "cross_entropy"]:
        """The per-token loss: a polynomial where values must stay dyadic or there are no tokens."""
        return "cross_entropy" if self.model.takes_tokens and not self.exact else "squared"


def case_behind(case: Case, action: Load) -> Case:
    """The case as its program goes on behind a resume: on that mesh, by that strategy."""
    mesh = Mesh(shape=action.shape) if action.shape else case.mesh
    engine = replace(case.engine, strategy=action.strategy or case.engine.strategy)
    return replace(case, mesh=mesh, engine=engine)


def literal_values(alias: object) -> tuple[str, ...]:
    """The strings of one of the `Literal` aliases above, simplest first."""
    return get_args(alias)

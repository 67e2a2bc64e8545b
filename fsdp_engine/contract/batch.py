"""A global batch, and how a rank's part of it is split into micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from fsdp_engine.contract.limits import (
    MAX_LENGTH,
    MAX_SEQUENCES,
    MAX_WORLD_SIZE,
    require,
    require_between,
)


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
class Static:
    """Micro-batches of a fixed number of sequences, in order.

    Every `group` consecutive sequences of a rank stay together: `sequences` is a multiple of it.
    """

    kind: Literal["static"] = "static"
    sequences: int = 1
    group: int = 1

    def __post_init__(self) -> None:
        require_between("planning.sequences", self.sequences, 1, MAX_SEQUENCES)
        require_between("planning.group", self.group, 1, MAX_SEQUENCES)
        legal = f"a divisor of planning.sequences={self.sequences}"
        require(self.sequences % self.group == 0, "planning.group", self.group, legal)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBudget:
    """Micro-batches planned by tokens: ranks agree on the largest count any of them needs.

    Every `group` consecutive sequences of a rank stay together, whatever their order; the budget
    holds a whole group.
    """

    kind: Literal["token_budget"] = "token_budget"
    max_tokens: int = 8
    group: int = 1

    def __post_init__(self) -> None:
        require_between("planning.max_tokens", self.max_tokens, 1, MAX_LENGTH * MAX_SEQUENCES)
        require_between("planning.group", self.group, 1, MAX_SEQUENCES)


Planning: TypeAlias = Static | TokenBudget

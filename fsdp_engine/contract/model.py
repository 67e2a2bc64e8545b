"""The model of a case."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from fsdp_engine.contract.limits import (
    MAX_UNITS,
    MAX_VOCAB,
    MAX_WIDTH,
    require,
    require_between,
)

Family: TypeAlias = Literal["linear", "mlp", "embedding", "llama", "qwen2", "mixtral"]
Frozen: TypeAlias = Literal["none", "first_unit", "biases"]
Part: TypeAlias = Literal["first_unit", "biases", "half"]
OptionalPart: TypeAlias = Literal["none", "parameter", "either", "unit"]
LoraTargets: TypeAlias = Literal["units", "named", "root", "all"]

TORCH_FAMILIES: tuple[Family, ...] = ("linear", "mlp", "embedding")
LANGUAGE_FAMILIES: tuple[Family, ...] = ("llama", "qwen2", "mixtral")


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The model to build: `units` wrapped blocks and a root that owns everything else.

    `linear`: blocks of one square layer over drawn features. `mlp`: residual blocks of two layers.
    `embedding`: the same over an embedding, with a head that may be tied to it. The language
    families are the ones of `transformers`, built from a config. `optional` is what only gated
    sequences use: a `parameter` inside the last unit or the last `unit` itself; with `either` the
    last unit has two such parameters of one size, and sequences that are not gated use the other.
    `lora_rank` 0 is no adapter; else layers get one, A and B non-zero, its part scaled by
    `lora_alpha / lora_rank`: every linear layer of the units, the first of each unit (`named`), the
    embedding and the head, which the root owns, or all of these.
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
    lora_targets: LoraTargets = "units"

    def __post_init__(self) -> None:
        require_between("model.units", self.units, 1, MAX_UNITS)
        require_between("model.width", self.width, 1, MAX_WIDTH)
        require_between("model.hidden", self.hidden, 1, MAX_WIDTH)
        require_between("model.vocab", self.vocab, 1, MAX_VOCAB)
        require_between("model.lora_rank", self.lora_rank, 0, 64)
        require_between("model.lora_alpha", self.lora_alpha, 0, 1024)
        if self.family in LANGUAGE_FAMILIES:
            plain = self.optional == "none" and not self.buffers and not self.bias
            require(plain, "model", self, "optional, buffers and bias belong to the torch families")
            require(self.width % 4 == 0, "model.width", self.width, "language: a multiple of 4")
            require(self.frozen != "biases", "model.frozen", self.frozen, "language: no biases")
        if self.tied:
            require(
                self.family not in ("linear", "mlp"),
                "model.tied",
                self.tied,
                f"{self.family} has no embedding to tie",
            )
        if self.frozen == "biases":
            require(self.bias, "model.frozen", self.frozen, "biases are frozen where bias is on")
        if not self.lora_rank:
            require(self.lora_targets == "units", "model.lora_targets", self, "with an adapter")
        else:
            require(
                self.frozen == "none" and self.optional == "none",
                "model.lora_rank",
                self.lora_rank,
                "an adapter freezes the base itself; frozen and optional stay none",
            )

    @property
    def is_language(self) -> bool:
        return self.family in LANGUAGE_FAMILIES

    @property
    def without_adapter(self) -> Model:
        """The model that the adapter was put on."""
        return replace(self, lora_rank=0, lora_targets="units")

    @property
    def can_merge_in_place(self) -> bool:
        """Whether an adapter can be added to the weights themselves.

        Not where a tied pair's two places have adapters of their own: they would need two weights.
        """
        return bool(self.lora_rank) and not (self.tied and self.lora_targets in ("root", "all"))

    @property
    def takes_tokens(self) -> bool:
        return self.family not in ("linear", "mlp")

"""Models, one kind per value of the kind axis; sizes often odd or smaller than a shard group."""

from __future__ import annotations

from typing import get_args

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from fsdp_engine.contract.model import (
    LANGUAGE_FAMILIES,
    TORCH_FAMILIES,
    Family,
    Frozen,
    LoraTargets,
    Model,
    OptionalPart,
)

# The default of `Model` first, then what no shard group divides.
SIZES = (4, 2, 3, 1, 5, 6, 7, 8, 9)
_EXACT_SIZES = (4, 2, 3, 1)
_UNITS = (1, 2, 3)
_TARGETS: tuple[LoraTargets, ...] = get_args(LoraTargets)
_TARGETS_OF_PAIR: tuple[LoraTargets, ...] = ("units", "root", "all", "root", "all")
_OPTIONAL: dict[str, tuple[OptionalPart, ...]] = {
    "optional_parameter": ("parameter", "either"),
    "optional_unit": ("unit",),
}


def models(kind: str, *, lora: bool, exact: bool = False) -> SearchStrategy[Model]:
    """Models of a kind of the main axis; `exact` keeps them small enough for exact sums."""
    if kind in get_args(Family):
        families: tuple[Family, ...] = tuple(
            family for family in get_args(Family) if family == kind
        )
    elif exact or kind == "buffers" or kind in _OPTIONAL:
        families = TORCH_FAMILIES
    else:
        families = (*TORCH_FAMILIES, *LANGUAGE_FAMILIES)
    if kind == "tied":
        families = tuple(family for family in families if family not in ("linear", "mlp"))
    return st.sampled_from(families).flatmap(
        lambda family: _models(family=family, kind=kind, lora=lora, exact=exact)
    )


@st.composite
def _models(draw: DrawFn, *, family: Family, kind: str, lora: bool, exact: bool) -> Model:
    language = family in LANGUAGE_FAMILIES
    has_tokens = family not in ("linear", "mlp")
    sizes = _EXACT_SIZES if exact else SIZES
    # A vocabulary of one token has no cross entropy to speak of.
    vocabularies = tuple(n for n in sizes if n > 1 or not has_tokens)
    # Drawn also where they do not apply: shrinking prefers fewer draws to simpler families.
    bias, buffers, tied = (draw(st.booleans(), label=name) for name in ("bias", "buffers", "tied"))
    frozen: Frozen = "none"
    if kind == "frozen":
        frozen = draw(st.sampled_from(("first_unit", "biases")), label="frozen")
        frozen = "first_unit" if language else frozen
    optional: OptionalPart = "none"
    if kind in _OPTIONAL:
        optional = draw(st.sampled_from(_OPTIONAL[kind]), label="optional")
    mixes = kind == "frozen" or kind in _OPTIONAL
    # Beside adapters on the units alone a tied pair is like any other two weights.
    targets = _TARGETS_OF_PAIR if kind == "tied" else _TARGETS
    return Model(
        family=family,
        units=draw(st.sampled_from(_UNITS[:2] if exact else _UNITS), label="units"),
        width=draw(st.sampled_from((4, 8) if language else sizes), label="width"),
        hidden=draw(st.sampled_from(sizes), label="hidden"),
        vocab=draw(st.sampled_from(vocabularies), label="vocab"),
        bias=not language and (bias or frozen == "biases"),
        tied=kind == "tied" or (mixes and has_tokens and tied),
        frozen=frozen,
        buffers=kind == "buffers" or (not language and (mixes or kind == "tied") and buffers),
        optional=optional,
        lora_rank=draw(st.sampled_from((2, 1, 4)), label="lora_rank") if lora else 0,
        lora_alpha=draw(st.sampled_from((2, 1, 3, 8, 0)), label="lora_alpha") if lora else 2,
        lora_targets=draw(st.sampled_from(targets), label="lora_targets") if lora else "units",
    )

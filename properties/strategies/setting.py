"""What a program may do with the model it is drawn for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from fsdp_engine.contract.model import Frozen, Model, Part

Contents: TypeAlias = Literal["all", "base", "adapter", "merged"]
Switch: TypeAlias = Literal["off", "merged"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a program may freeze, what is frozen before it, what it may export.

    `switches` are what inference may do with an adapter; `fuses`: the model has fused experts.
    """

    parts: tuple[Part, ...]
    frozen: Frozen
    contents: tuple[Contents, ...] = ("all",)
    switches: tuple[Switch, ...] = ()
    fuses: bool = False

    @staticmethod
    def of(model: Model) -> Setting:
        """An adapter fixes what trains: nothing can be frozen then."""
        parts: tuple[Part, ...] = ("first_unit", "half", "biases")
        if model.lora_rank:
            parts = ()
        elif not model.bias:
            parts = parts[:2]
        return Setting(
            parts=parts,
            frozen=model.frozen,
            contents=("all", "merged", "base", "adapter") if model.lora_rank else ("all",),
            switches=_switches(model),
            fuses=model.family == "mixtral",
        )


def _switches(model: Model) -> tuple[Switch, ...]:
    if not model.lora_rank:
        return ()
    return ("off", "merged") if model.can_merge_in_place else ("off",)

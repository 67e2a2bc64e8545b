"""What verl wraps as a unit, by the rules of its two wrapping functions."""

from __future__ import annotations

import functools

from fsdp_engine.contract.case import Case
from fsdp_engine.contract.observation import Unit
from fsdp_engine.workload.models import parameter_names, unit_names, unit_of

_OWN = ("embed", "embed_tokens", "lm_head")


@functools.lru_cache(maxsize=64)
def units(case: Case) -> tuple[Unit, ...]:
    """The root first, then the units in forward order.

    Both wrap the blocks. FSDP1 wraps every layer of an adapter by itself as well. FSDP2 wraps every
    embedding and what is called `lm_head`, unless the two are tied.
    """
    owned: dict[str, list[str]] = {name: [] for name in ("", *unit_names(case))}
    for name in parameter_names(case.model):
        owned.setdefault(_owner(case, name), []).append(name)
    return tuple(Unit(name=unit, parameters=tuple(names)) for unit, names in owned.items())


def _owner(case: Case, name: str) -> str:
    module, _, leaf = name.rpartition(".")
    block = unit_of(case, name)
    if case.engine.strategy == "fsdp1":
        is_layer = ".lora_" in module and leaf == "weight"
        return module if is_layer else block
    own = module.removesuffix(".base_layer").rpartition(".")[2] in _OWN and ".lora_" not in name
    return module if own and not block and not case.model.tied else block

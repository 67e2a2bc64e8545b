"""What verl does not offer, in words."""

from __future__ import annotations

from fsdp_engine.adapters.verl import config
from fsdp_engine.contract.actions import Export, Load
from fsdp_engine.contract.case import Case, case_behind


def refusal(case: Case) -> str | None:
    """Why a case does not apply to verl; None where it does."""
    if "float64" in (case.dtypes.storage, case.dtypes.compute, case.dtypes.reduce):
        return "verl has no fp64: its precision names are fp16, fp32 and bf16"
    loads = [action for action in case.program if isinstance(action, Load)]
    for at in (case, *(case_behind(case, load) for load in loads)):
        if config.fsdp_size(at) is None:
            return f"no fsdp_size of verl makes the mesh {at.mesh.shape}"
    if case.model.frozen != "none":
        return "verl freezes nothing but the base below an adapter"
    return _without_field(case)


def not_exported(case: Case) -> str | None:
    """What of a case verl has no export for; None where it has."""
    exports = [action for action in case.program if isinstance(action, Export)]
    if exports and case.model.family == "mixtral":
        return "verl exports experts one by one, by the names that Qwen has for them"
    if any(export.weights == "all" for export in exports) and case.model.lora_rank:
        return "verl exports base, adapter or merged weights, not the module as it is wrapped"
    return None


def _without_field(case: Case) -> str | None:
    for name, _ in case.engine.overrides:
        if not config.known_field(name) and name != "no_such_field":
            return f"verl's FSDP engine has no configuration field {name}"
    return None

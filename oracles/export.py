"""What a weight export must yield: the workload model's state dict with the current weights.

Of a model with an adapter also its base, its adapter or both added. Initial weights come from the
case. Trained ones are the engine's own parameters, assembled: the step is judged elsewhere, the
export must tell the truth about its result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from fsdp_engine.contract.actions import Export
from fsdp_engine.contract.case import Case
from fsdp_engine.workload.models import build_model
from oracles.adapters import adapter_tensors, base_tensors, merged_weights
from oracles.arrays import dtype_name
from oracles.running_error import Bounded


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """Full tensors by name, persistent buffers and every name of a tied parameter included.

    Of those in `bounds` an adapter is a part: they are known to within an error, and `tensors` has
    what it was added to. All others are known to the bit.
    """

    tensors: dict[str, Tensor]
    bounds: dict[str, Bounded] = field(default_factory=dict)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def dtype(self, name: str) -> str:
        return dtype_name(self.tensors[name].dtype)


def predict_initial(case: Case) -> Exported:
    """The export before any step: bit for bit what the workload built, in the storage dtype."""
    state = build_model(case).state_dict()
    return Exported(tensors={name: tensor.detach() for name, tensor in state.items()})


def predict_trained(case: Case, parameters: Mapping[str, Tensor]) -> Exported:
    """The export while the parameters are `parameters` (full, by first name); buffers unchanged."""
    module = build_model(case)
    first_names = {id(parameter): name for name, parameter in module.named_parameters()}
    alias_of = {
        name: first_names[id(parameter)]
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }
    state = module.state_dict()
    return Exported(
        tensors={
            name: parameters[alias_of[name]] if name in alias_of else tensor.detach()
            for name, tensor in state.items()
        }
    )


def predict(case: Case, parameters: Mapping[str, Tensor], action: Export) -> Exported:
    """The export of an action while the parameters are `parameters` (full, by first name)."""
    whole = predict_trained(case, parameters)
    base = adapter = whole.tensors
    if action.weights != "all":
        base, adapter = base_tensors(case, whole.tensors), adapter_tensors(whole.tensors)
    exported = Exported(tensors=adapter if action.weights == "adapter" else base)
    if action.weights == "merged":
        exported = Exported(tensors=base, bounds=merged_weights(case, base, adapter))
    return _unfused(exported) if action.unfuse and case.model.family == "mixtral" else exported


_EXPERTS = ".mlp.experts."
_ROUTER = ".mlp.gate."
_PUBLISHED = ".block_sparse_moe."


def _unfused(exported: Exported) -> Exported:
    """Experts one by one, by the names of published Mixtral checkpoints.

    The two fused tensors of a layer hold, expert by expert, w1 above w3 and w2; their mapping is
    `transformers/conversion_mapping.py`, read backwards.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in exported.tensors.items():
        layer, found, fused = name.partition(_EXPERTS)
        if not found:
            tensors[name.replace(_ROUTER, f"{_PUBLISHED}gate.")] = tensor
            continue
        for number in range(len(tensor)):
            path = f"{layer}{_PUBLISHED}experts.{number}"
            if fused == "down_proj":
                tensors[f"{path}.w2.weight"] = tensor[number]
            else:
                half = tensor.shape[1] // 2
                tensors[f"{path}.w1.weight"] = tensor[number, :half]
                tensors[f"{path}.w3.weight"] = tensor[number, half:]
    return Exported(tensors=tensors, bounds=exported.bounds)

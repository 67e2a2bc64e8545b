"""What a plain weight export must yield: the workload model's state dict with the current weights.

Initial weights come from the case. Trained ones are the engine's own parameters, assembled: the
step is judged elsewhere, the export must tell the truth about its result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fsdp_engine.contract.case import Case
from fsdp_engine.contract.observation import LocalArray
from fsdp_engine.workload.models import build_model
from oracles.arrays import dtype_name
from oracles.assembly import Assembled, assemble


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """Full tensors by name, persistent buffers and every name of a tied parameter included."""

    tensors: dict[str, Tensor]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def dtype(self, name: str) -> str:
        return dtype_name(self.tensors[name].dtype)


def predict_initial(case: Case) -> Exported:
    """The export before any step: bit for bit what the workload built, in the storage dtype."""
    state = build_model(case).state_dict()
    return Exported(tensors={name: tensor.detach() for name, tensor in state.items()})


def predict_trained(case: Case, parameters: dict[str, Tensor]) -> Exported:
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


def assemble_parameters(
    case: Case, ranks: Sequence[Sequence[LocalArray]], *, where: str
) -> Assembled:
    """The ranks' parts of every parameter of the case's model put together."""
    shapes = {
        name: tuple(parameter.shape) for name, parameter in build_model(case).named_parameters()
    }
    return assemble(ranks, mesh=case.mesh, shapes=shapes, where=where)

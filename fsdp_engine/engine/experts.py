"""Fused experts one by one, by the names of published checkpoints.

`transformers` 5 keeps the experts of a layer in two tensors, `[experts, 2 * hidden, width]` with
the gate's rows before the others and `[experts, width, hidden]`, and renames the block that holds
them; its own mapping is in `transformers/conversion_mapping.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import Tensor, nn

from fsdp_engine.contract.errors import ConfigError

_LAYOUTS = {"mixtral": ("block_sparse_moe", "w1", "w3", "w2")}
"""By model type: the block's name in checkpoints, and those of gate, up and down."""

_FUSED = re.compile(r"(?P<path>.*\.)mlp\.experts\.(?P<kind>gate_up_proj|down_proj)$")
_ROUTER = re.compile(r"(?P<path>.*\.)mlp\.gate\.weight$")


def expert_layout(model: nn.Module) -> str | None:
    """The model's type where it has fused experts that have names; None where it has none.

    Raises:
        ConfigError: it has fused experts of a type that is not known here.
    """
    if not any(_FUSED.match(name) for name, _ in model.named_parameters()):
        return None
    kind = str(getattr(getattr(model, "config", None), "model_type", None))
    if kind not in _LAYOUTS:
        raise ConfigError(f"export.unfuse: model type {kind!r}; legal are {sorted(_LAYOUTS)}")
    return kind


def unfused(tensors: Iterator[tuple[str, Tensor]], kind: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors with every fused one as one per expert and projection, and the router renamed."""
    block, gate, up, down = _LAYOUTS[kind]
    for name, tensor in tensors:
        fused, router = _FUSED.match(name), _ROUTER.match(name)
        if router:
            yield f"{router['path']}{block}.gate.weight", tensor
        elif not fused:
            yield name, tensor
        else:
            projections = (gate, up) if fused["kind"] == "gate_up_proj" else (down,)
            for expert, matrices in enumerate(tensor):
                parts = matrices.chunk(len(projections))
                for projection, matrix in zip(projections, parts, strict=True):
                    path = f"{fused['path']}{block}.experts.{expert}.{projection}"
                    yield f"{path}.weight", matrix.clone()

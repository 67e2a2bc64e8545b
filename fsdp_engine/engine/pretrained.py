"""A folder that `transformers` loads: one file of weights and a config, written by rank 0."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_engine.contract.actions import Export
from fsdp_engine.contract.errors import ConfigError, EngineStateError
from fsdp_engine.engine.weights import WeightPlan, Weights

WEIGHTS_FILE = "model.safetensors"


def write_safetensors(
    weights: Weights,
    folder: Path,
    *,
    kind: Literal["all", "base", "merged"] = "all",
    unfuse: bool = False,
) -> None:
    """Write the weights so that `from_pretrained(folder)` gives a model with the same logits.

    A collective call: all ranks return when the files are complete. A tied weight is in the file
    once, as the config says that it is tied; where an adapter in one of its places makes two of it,
    both are in the file and the config says that they are not tied. Rank 0 holds all of the model
    in host memory meanwhile.

    Raises:
        ConfigError: at once, on every rank: `transformers` cannot load what would be written.
        EngineStateError: on every rank: rank 0 could not write, its error is the cause there.
    """
    config = _config_of(weights.plan, kind)
    tensors = weights.export(Export(weights=kind, unfuse=unfuse))
    failure: OSError | None = None
    if dist.get_rank():
        for _ in tensors:
            pass
    else:
        kept = {name: tensor.cpu().contiguous() for name, tensor in tensors}
        try:
            _write(folder, kept, _aliases(weights.plan), config)
        except OSError as error:
            failure = error
    failed = torch.tensor([int(failure is not None)], device=weights.device)
    dist.all_reduce(failed, op=dist.ReduceOp.MAX)
    if failed.item():
        raise EngineStateError(f"write_safetensors: rank 0 could not write {folder}") from failure


def _config_of(plan: WeightPlan, kind: str) -> Any:
    if kind == "all" and plan.adapter is not None:
        raise ConfigError(
            "write_safetensors.kind: 'all' of a model with an adapter has peft's names; legal are "
            "'base' and 'merged'"
        )
    model = plan.model.get_submodule("base_model.model") if plan.adapter else plan.model
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "save_pretrained"):
        raise ConfigError(f"write_safetensors: {type(model).__name__} has no config to write")
    config = copy.deepcopy(config)
    config.architectures = [type(model).__name__]
    return config


def _aliases(plan: WeightPlan) -> dict[str, str]:
    """Further names of tied parameters, each with the first, as a base export has them."""
    entries = plan.entries
    if plan.adapter is not None:
        entries = tuple(plan.adapter.entries(entries, "base"))
    first: dict[str, str] = {}
    return {
        entry.name: first[entry.parameter]
        for entry in entries
        if entry.parameter is not None
        and first.setdefault(entry.parameter, entry.name) != entry.name
    }


def _write(folder: Path, tensors: dict[str, Tensor], aliases: dict[str, str], config: Any) -> None:
    from safetensors.torch import save_file  # noqa: PLC0415  with transformers, which takes seconds

    if all(torch.equal(tensors[name], tensors[first]) for name, first in aliases.items()):
        tensors = {name: tensor for name, tensor in tensors.items() if name not in aliases}
    else:
        config.tie_word_embeddings = False
    config.dtype = next(t.dtype for t in tensors.values() if t.is_floating_point())
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    part = folder / f"{WEIGHTS_FILE}.part"
    save_file(tensors, part, metadata={"format": "pt"})
    part.replace(folder / WEIGHTS_FILE)

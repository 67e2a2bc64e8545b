"""What FSDP1 and FSDP2 hold unsharded at a moment: parameters in full, waiting gradients.

Checked on torch 2.13. The figures per wrapper and option are in the docstring of `Units`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from fsdp_engine.torch_private.shards import fsdp2_names, plain_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Retained:
    """Names of the parameters resident in full, and unsharded bytes kept by the wrapper."""

    unsharded: tuple[str, ...]
    gradient_bytes: int
    parameter_bytes: int


class Units:
    """The wrapped units of a module, found once: looking for them costs more than asking them.

    FSDP1 keeps the flat gradient not yet reduced and the padded flat parameter, while allocated;
    FSDP2 gradients accumulated without reduction (or an output that waits for its all-reduce) and
    all-gather outputs, while allocated. A module without wrappers is resident in full.
    """

    def __init__(self, module: nn.Module) -> None:
        modules = list(module.named_modules())
        self._handles = [
            (submodule._handle, _names(path, submodule._handle))
            for path, submodule in modules
            if isinstance(submodule, FullyShardedDataParallel) and submodule._handle is not None
        ]
        groups: dict[int, Any] = {  # modules that were sharded together share theirs
            id(group): group
            for _, submodule in modules
            if isinstance(submodule, FSDPModule)
            for group in submodule._get_fsdp_state()._fsdp_param_groups
        }
        self._groups = list(groups.values())
        self._names = fsdp2_names(module) if self._groups else {}
        plain = not self._handles and not self._groups
        self._whole = tuple(name for name, _ in module.named_parameters()) if plain else ()

    def retained(self) -> Retained:
        """What they hold now."""
        parts = [_fsdp1(handle, names) for handle, names in self._handles]
        parts += [_fsdp2(group, self._names) for group in self._groups]
        return Retained(
            unsharded=self._whole + tuple(name for part in parts for name in part.unsharded),
            gradient_bytes=sum(part.gradient_bytes for part in parts),
            parameter_bytes=sum(part.parameter_bytes for part in parts),
        )


def _names(path: str, handle: Any) -> tuple[str, ...]:
    prefix = f"{path}." if path else ""
    return tuple(plain_name(prefix + name) for name in handle.flat_param._fqns)


def _fsdp1(handle: Any, names: tuple[str, ...]) -> Retained:
    flat: Any = handle.flat_param
    if not handle.uses_sharded_strategy:
        return Retained(unsharded=names, gradient_bytes=0, parameter_bytes=0)
    gathered = sum(
        _bytes(getattr(flat, attribute, None))
        for attribute in ("_full_param_padded", "_full_prec_full_param_padded")
    )
    # In no_sync the flat gradient keeps the unsharded size until a synchronised backward.
    waiting = flat.grad is not None and flat.grad.numel() > flat._local_shard.numel()
    return Retained(
        unsharded=names if gathered else (),
        gradient_bytes=_bytes(flat.grad) if waiting else 0,
        parameter_bytes=gathered,
    )


def _fsdp2(group: Any, names: dict[int, str]) -> Retained:
    gradient_bytes = _bytes(group._partial_reduce_output)
    parameter_bytes = 0
    unsharded = []
    for parameter in group.fsdp_params:
        gradient_bytes += _waiting(parameter)
        gathered = sum(_bytes(output) for output in parameter.all_gather_outputs)
        parameter_bytes += gathered
        whole = group._sharded_state.name == "UNSHARDED"
        if whole or getattr(group.mesh_info, "shard_mesh_size", 1) == 1:
            unsharded.append(names[id(parameter)])
    return Retained(
        unsharded=tuple(unsharded),
        gradient_bytes=gradient_bytes,
        parameter_bytes=parameter_bytes,
    )


def _waiting(parameter: Any) -> int:
    accumulated = _bytes(parameter.unsharded_accumulated_grad)
    unsharded = getattr(parameter, "_unsharded_param", None)
    return accumulated + (0 if unsharded is None else _bytes(unsharded.grad))


def _bytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.untyped_storage().size()

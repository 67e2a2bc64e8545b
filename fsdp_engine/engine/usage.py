"""Which parameters received a gradient, on this rank and on any.

FSDP gives zeros to a parameter that was not used while others of its unit were. An optimizer
must not see them: they decay the parameter and its moments. Only the ranks together know that a
parameter was not used.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fsdp_engine.engine.units import ParameterSlot, Unit


class Usage:
    """Watches the parameters of a model from before it is wrapped; frozen ones are never used."""

    def __init__(self, units: tuple[Unit, ...]) -> None:
        self._used: set[str] = set()
        self._hooks: list[RemovableHandle] = []
        self._names: list[str] = []
        for unit in units:
            self._names += [slot.name for slot in unit.slots]
            # Runs after the wrapper's own pre-forward: what is registered then is gathered.
            unit.module.register_forward_pre_hook(partial(self._watch, unit.slots))

    def clear(self) -> None:
        """Forget all gradients so far."""
        self._used.clear()
        self.end_micro_batch()

    def end_micro_batch(self) -> None:
        """Stop watching the tensors of the last forward."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def unused_anywhere(self, device: torch.device) -> frozenset[str]:
        """Names that no rank used. A collective call: one all-reduce of a flag per parameter."""
        flags = torch.tensor(
            [name in self._used for name in self._names], dtype=torch.uint8, device=device
        )
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        used = flags.tolist()
        return frozenset(name for name, flag in zip(self._names, used, strict=True) if not flag)

    def _watch(
        self, slots: tuple[ParameterSlot, ...], _module: nn.Module, _arguments: object
    ) -> None:
        if not torch.is_grad_enabled():
            return
        for slot in slots:
            tensor: Tensor = getattr(slot.module, slot.attribute)
            if tensor.requires_grad:
                mark = partial(self._mark, slot.name)
                self._hooks.append(tensor.register_hook(mark))  # type: ignore[no-untyped-call]  # so in torch

    def _mark(self, name: str, _grad: Tensor) -> None:
        self._used.add(name)

"""What torch's wrappers do with a rank's device memory: retold with tensors of the same sizes.

A wrapper here is called where torch's own hooks are; what torch keeps in an attribute or in a local
variable is kept in one for as long. For sharded models, every part of which is used and trained.
Checked byte for byte against real ranks on the simulated device, torch 2.13.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from fsdp_engine.contract.case import Dtype
from fsdp_engine.workload.models import TORCH_DTYPES


@dataclass(slots=True, kw_only=True, eq=False)
class Unit:
    """One unit and what is kept for it; the root's name is empty.

    `full`: its gathered parameters. `reduced`: the shard of its gradients. `began`: its backward
    has begun.
    """

    name: str
    full: Tensor | None = None
    reduced: Tensor | None = None
    began: bool = False


_Unit = TypeVar("_Unit", bound=Unit, contravariant=True)


class Wrapper(Protocol[_Unit]):
    """The moments of a micro-batch, in torch's order. `syncing`: its gradients are reduced."""

    syncing: bool

    @property
    def units(self) -> Sequence[Any]: ...
    def weights(self) -> list[Tensor]:
        """Parameters of the module; what they take is counted by hand."""

    def first_forward(self) -> None: ...
    def pre_forward(self, unit: _Unit) -> None: ...
    def post_forward(self, unit: _Unit) -> None: ...
    def pre_backward(self, unit: _Unit) -> None: ...
    def post_backward(self, unit: _Unit) -> None: ...
    def end_backward(self) -> None: ...


def made(elements: int, dtype: Dtype) -> Tensor:
    """A tensor of no meaning."""
    return torch.empty(elements, dtype=TORCH_DTYPES[dtype])

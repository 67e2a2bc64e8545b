"""Norm, clipping and the optimizer step, the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_engine.engine.config import OptimizerConfig, OptimizerName

STATE_SLOTS: dict[OptimizerName, tuple[str, ...]] = {
    "SGD": (),
    "AdamW": ("step", "exp_avg", "exp_avg_sq"),
}
"""What each optimizer keeps per parameter, by torch's names."""


def make_optimizer(module: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer over all parameters of the wrapped module.

    Built after wrapping: one built before would keep the unsharded parameters and never update
    the module. Frozen ones have no gradient, so nothing happens to them until they are unfrozen.
    """
    parameters = list(module.parameters())
    if config.optimizer == "SGD":
        return torch.optim.SGD(parameters, lr=config.lr, weight_decay=config.weight_decay)
    return torch.optim.AdamW(
        parameters, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay
    )


def local_gradients(module: nn.Module) -> list[Tensor]:
    """This rank's shards of the gradients that are present."""
    present = (parameter.grad for parameter in module.parameters())
    return [_local(grad) for grad in present if grad is not None]


@torch.no_grad()
def global_norm(gradients: Iterable[Tensor], num_shards: int, device: torch.device) -> float:
    """The 2-norm of the whole gradient from each rank's shards. A collective call.

    Squares are exact and sums rounded in fp64, whatever dtype the gradients have, so large fp32
    gradients do not overflow. Every rank adds the same numbers in the same order: those of the
    first replica, ranks 0 to `num_shards - 1`. If any rank of any replica has a non-finite
    element, the norm is non-finite on all ranks.
    """
    gradients = list(gradients)
    place = gradients[0].device if gradients else device  # the host where FSDP2 offloads
    squares = torch.zeros(1, dtype=torch.float64, device=place)
    for gradient in gradients:
        squares += gradient.to(torch.float64).square().sum()
    by_rank = torch.empty(dist.get_world_size(), dtype=torch.float64, device=device)
    dist.all_gather_into_tensor(by_rank, squares.to(device))
    parts = by_rank.tolist()
    finite = all(map(math.isfinite, parts))
    return math.sqrt(math.fsum(parts[:num_shards]) if finite else sum(parts))


@torch.no_grad()
def clip(gradients: Iterable[Tensor], norm: float, clip_grad: float) -> None:
    """Scale by `min(1, clip_grad / (norm + 1e-6))`, in place."""
    factor = min(1.0, clip_grad / (norm + 1e-6))
    if factor < 1.0:
        for gradient in gradients:
            gradient.mul_(factor)


def _local(gradient: Tensor) -> Tensor:
    if isinstance(gradient, DTensor):
        local: Tensor = gradient.to_local()
        return local
    return gradient

"""Reads what a trainee is into plain data, without changing it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from fsdp_engine.contract.observation import LocalArray, ModuleState, OptimizerState, Resting
from fsdp_engine.contract.protocol import LocalShard, Trainee
from fsdp_engine.torch_private.shards import plain_name
from fsdp_engine.world.consumer import as_array


def module_state(trainee: Trainee) -> ModuleState:
    """Mode, what trains, where everything is, and this rank's parts of the parameters."""
    module = trainee.module
    parameters = {plain_name(name): value for name, value in module.named_parameters()}
    buffers = {plain_name(name): value for name, value in module.named_buffers()}
    return ModuleState(
        training=module.training,
        requires_grad={name: value.requires_grad for name, value in parameters.items()},
        devices={name: str(value.device) for name, value in {**parameters, **buffers}.items()},
        parameters=arrays(trainee.parameters()),
    )


def optimizer_state(trainee: Trainee) -> OptimizerState:
    """This rank's parts, by slot."""
    slots: dict[str, list[LocalShard]] = {}
    for slot, shard in trainee.optimizer_state():
        slots.setdefault(slot, []).append(shard)
    return {slot: arrays(shards) for slot, shards in slots.items()}


def resting(trainee: Trainee, *, device_bytes: int) -> Resting:
    """Where the trainee's tensors are, and what the device holds."""
    module = trainee.module
    parameters = list(module.parameters())
    return Resting(
        parameters=_places(parameters),
        gradients=_places(p.grad for p in parameters if p.grad is not None),
        buffers=_places(module.buffers()),
        optimizer=_places(
            shard.data
            for slot, shard in trainee.optimizer_state()
            if slot != "step" and shard.data is not None
        ),
        device_bytes=device_bytes,
    )


def _places(tensors: Iterable[Tensor]) -> tuple[str, ...]:
    return tuple(sorted({tensor.device.type for tensor in tensors}))


def random_digest() -> str:
    """Of the state of torch's generator on the host."""
    return hashlib.sha256(as_array(torch.get_rng_state()).data).hexdigest()


def copies(shards: Iterable[LocalShard]) -> tuple[LocalShard, ...]:
    """The same parts on the host, in memory of their own."""
    return tuple(
        replace(
            shard, data=None if shard.data is None else shard.data.detach().to("cpu", copy=True)
        )
        for shard in shards
    )


def arrays(shards: Iterable[LocalShard]) -> tuple[LocalArray, ...]:
    """The same parts as data."""
    return tuple(
        LocalArray(
            name=shard.name,
            full_shape=tuple(shard.full_shape),
            placement=shard.placement,
            data=None if shard.data is None else as_array(shard.data),
        )
        for shard in shards
    )

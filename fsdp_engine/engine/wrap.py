"""Wrap a model's units and its root by FSDP1 or FSDP2."""

from __future__ import annotations

import itertools
import warnings
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import CustomPolicy

from fsdp_engine.engine.config import DTYPES, EngineConfig
from fsdp_engine.engine.sharding import get_sharding_strategy, replicates
from fsdp_engine.engine.units import Unit
from fsdp_engine.torch_private.deferred import permit_low_precision


def wrap(
    units: tuple[Unit, ...], config: EngineConfig, mesh: DeviceMesh, device: torch.device
) -> nn.Module:
    """The wrapped root of `units`. The weights are already there, the same on every rank."""
    if config.strategy == "fsdp":
        return _fsdp1(units, config, mesh, device)
    return _fsdp2(units, config, mesh, device)


def _fsdp1(
    units: tuple[Unit, ...], config: EngineConfig, mesh: DeviceMesh, device: torch.device
) -> FullyShardedDataParallel:
    root = units[-1].module
    inner = {unit.module for unit in units[:-1]}
    dtypes = _dtypes(config)
    precision = MixedPrecision(
        param_dtype=dtypes["param_dtype"],
        reduce_dtype=dtypes["reduce_dtype"],
        buffer_dtype=dtypes["buffer_dtype"],
        cast_forward_inputs=True,
        cast_root_forward_inputs=True,
    )
    options: dict[str, Any] = {
        "auto_wrap_policy": CustomPolicy(lambda module: module in inner),
        "mixed_precision": precision if any(dtypes.values()) else None,
        "device_id": device,
        "forward_prefetch": config.forward_prefetch,
        "use_orig_params": config.use_orig_params,
    }
    if replicates(mesh.shape):
        options["sharding_strategy"] = ShardingStrategy.NO_SHARD
    else:
        options["device_mesh"] = mesh
        options["sharding_strategy"] = get_sharding_strategy(
            mesh.ndim, zero3=config.reshard_after_forward
        )
    with warnings.catch_warnings():
        # NO_SHARD is marked for removal in favour of DDP, which is another engine.
        warnings.filterwarnings("ignore", message="The `NO_SHARD` sharding strategy is deprecated")
        wrapped = FullyShardedDataParallel(root, **options)
    if replicates(mesh.shape):
        permit_low_precision(wrapped)
    return wrapped


def _fsdp2(
    units: tuple[Unit, ...], config: EngineConfig, mesh: DeviceMesh, device: torch.device
) -> nn.Module:
    dtypes = _dtypes(config)
    policy = MixedPrecisionPolicy(
        param_dtype=dtypes["param_dtype"],
        reduce_dtype=dtypes["reduce_dtype"],
        cast_forward_inputs=True,
    )
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    if config.offload_policy:
        # Pinned, so that copies need not wait; of the host's own memory nothing is copied.
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type != "cpu")
    for unit in units[:-1]:
        fully_shard(unit.module, reshard_after_forward=config.reshard_after_forward, **options)
    root = units[-1].module
    # The root's backward follows its forward at once: torch's default, None, keeps it gathered.
    fully_shard(
        root, reshard_after_forward=None if config.reshard_after_forward else False, **options
    )
    # A parameter that this rank does not use may be used on another: all must reduce the same.
    cast(FSDPModule, root).set_reduce_scatter_unused_params(True)
    if config.forward_prefetch:
        _prefetch_forward(root)
    return root


def _prefetch_forward(root: nn.Module) -> None:
    """Every unit gathers the next one before it runs."""
    in_order = [m for m in root.modules() if isinstance(m, FSDPModule) and m is not root]
    for unit, following in itertools.pairwise(in_order):
        unit.set_modules_to_forward_prefetch([following])


def _dtypes(config: EngineConfig) -> dict[str, torch.dtype | None]:
    """The policy's dtypes, None where nothing is cast."""
    names = {
        "param_dtype": config.mixed_precision.param_dtype,
        "reduce_dtype": config.mixed_precision.reduce_dtype,
        "buffer_dtype": config.mixed_precision.buffer_dtype,
    }
    return {field: DTYPES[name] if name else None for field, name in names.items()}

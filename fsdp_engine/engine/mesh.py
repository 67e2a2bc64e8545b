"""The device mesh: its shape from the size option, its axes by name."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_engine.contract.errors import ConfigError

AXES: dict[int, tuple[str, ...]] = {1: ("shard",), 2: ("replicate", "shard")}
"""Axis names by number of dimensions; ranks are in row-major order."""


def mesh_shape(world_size: int, fsdp_size: int) -> tuple[int, ...]:
    """The mesh for `fsdp_size` ranks per shard group.

    Negative, or at least the world size: one shard group of all ranks. A divisor of the world
    size: `(world_size / fsdp_size, fsdp_size)`, replicas by shards.

    Raises:
        ConfigError: zero, or a smaller number that does not divide the world size: some ranks
            would have no place in the mesh.
    """
    if world_size < 1:
        raise ConfigError(f"world_size: {world_size!r} is not legal; legal is at least 1")
    if fsdp_size < 0 or fsdp_size >= world_size:
        return (world_size,)
    if fsdp_size == 0 or world_size % fsdp_size:
        divisors = [n for n in range(1, world_size) if world_size % n == 0]
        raise ConfigError(
            f"fsdp_size: {fsdp_size!r} is not legal in a world of {world_size}; legal is one of "
            f"{divisors}, at least {world_size}, or negative for all ranks"
        )
    return (world_size // fsdp_size, fsdp_size)


def make_mesh(shape: tuple[int, ...], *, world_size: int, device_type: str) -> DeviceMesh:
    """A mesh over exactly the ranks of the world. A collective call.

    Raises:
        NotImplementedError: another number of dimensions than one or two.
        ConfigError: the extents do not multiply to the world size.
    """
    require_mesh(shape, world_size=world_size)
    return init_device_mesh(device_type, shape, mesh_dim_names=AXES[len(shape)])


def require_mesh(shape: tuple[int, ...], *, world_size: int) -> None:
    """Refuse, without any collective, what `make_mesh` would refuse."""
    if len(shape) not in AXES:
        raise NotImplementedError(f"mesh ndim {len(shape)}: meshes have one or two dimensions")
    num_ranks = 1
    for extent in shape:
        num_ranks *= extent
    if num_ranks != world_size or min(shape) < 1:
        raise ConfigError(
            f"mesh: {shape!r} is not legal in a world of {world_size}; legal are positive extents "
            "whose product is the world size"
        )

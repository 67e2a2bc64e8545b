"""Which of FSDP1's sharding strategies runs on which mesh."""

from __future__ import annotations

from torch.distributed.fsdp import ShardingStrategy

from fsdp_engine.torch_private.strategies import HYBRID_SHARD_ZERO2

_BY_MESH: dict[tuple[int, bool], ShardingStrategy] = {
    (1, True): ShardingStrategy.FULL_SHARD,
    (1, False): ShardingStrategy.SHARD_GRAD_OP,
    (2, True): ShardingStrategy.HYBRID_SHARD,
    (2, False): HYBRID_SHARD_ZERO2,
}


def get_sharding_strategy(mesh_ndim: int, *, zero3: bool) -> ShardingStrategy:
    """The strategy for a mesh of so many dimensions, resharding after forward (`zero3`) or not.

    Raises:
        NotImplementedError: another number of dimensions than one or two.
    """
    if (mesh_ndim, zero3) not in _BY_MESH:
        raise NotImplementedError(f"mesh ndim {mesh_ndim}: there are strategies for 1 and 2")
    return _BY_MESH[mesh_ndim, zero3]


def replicates(mesh_shape: tuple[int, ...]) -> bool:
    """Whether FSDP1 runs with NO_SHARD over the default process group.

    With one shard per group there is nothing to shard. FSDP1's hybrid strategies would fall back
    to NO_SHARD by themselves, but over the shard axis: they would reduce every gradient over one
    rank and never over the replicas.
    """
    return mesh_shape[-1] == 1

"""Caches of torch that outlive a case. Checked on torch 2.13."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor, _redistribute
from torch.distributed.tensor._collective_utils import MeshTopoInfo
from torch.distributed.tensor.debug import _clear_sharding_prop_cache


def forget_meshes() -> None:
    """Empty what DTensor remembers of operators and redistributions by mesh.

    It keeps every mesh it has seen alive, and with it the process groups and their threads, which
    poll.
    """
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]  # so in torch
    dispatcher: Any = DTensor._op_dispatcher
    dispatcher.sharding_propagator._propagate_tensor_meta_cached.cache_clear()
    MeshTopoInfo.build_from_mesh.cache_clear()
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()

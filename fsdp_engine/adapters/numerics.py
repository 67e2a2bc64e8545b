"""What torch's FSDP1 and FSDP2 compute for a case, declared as data.

Sources, torch 2.13: `fsdp/_runtime_utils.py::_reduce_grad` and `_init_utils.py` (FSDP1),
`fsdp/_fully_shard/_fsdp_collectives.py::_get_gradient_divide_factors` (FSDP2).
"""

from __future__ import annotations

import functools

from fsdp_engine.contract.case import Case, Dtype
from fsdp_engine.contract.observation import Level, Numerics, Unit
from fsdp_engine.workload.models import parameter_names, unit_names, unit_of


def fsdp1_numerics(case: Case) -> Numerics:
    """FSDP1: pre-divide, sum over the shards, sum over the replicas, post-divide.

    Deferred gradients add up in the compute dtype. The norm is taken in fp32 whatever the
    gradients are, but handed back in their dtype; on one rank it is taken in that dtype too.
    """
    return Numerics(
        storage=case.dtypes.storage,
        compute=case.dtypes.compute,
        reduce=case.dtypes.reduce,
        deferred=case.engine.deferred,
        local_accumulate=case.dtypes.compute,
        shard_accumulate=case.dtypes.storage,
        norm=norm_dtype(case),
        levels=_around_sums(case),
        units=units(case),
        input_cast=case.dtypes.mixed,
        semantics="fsdp1",
    )


def fsdp2_numerics(case: Case) -> Numerics:
    """FSDP2: average over the shards, then over the replicas; fp64 and fp16 pre- and post-divide.

    Deferred gradients add up in the reduce dtype. The norm is taken in the gradients' dtype.
    """
    averages = case.dtypes.reduce in ("float32", "bfloat16")
    return Numerics(
        storage=case.dtypes.storage,
        compute=case.dtypes.compute,
        reduce=case.dtypes.reduce,
        deferred=case.engine.deferred,
        local_accumulate=case.dtypes.reduce,
        shard_accumulate=case.dtypes.storage,
        norm=norm_dtype(case),
        levels=_averages(case) if averages else _around_sums(case),
        units=units(case),
        input_cast=case.dtypes.mixed,
        semantics="fsdp2",
    )


def norm_dtype(case: Case) -> Dtype:
    """The dtype of the gradients, in which torch takes their norm or at least returns it."""
    return case.dtypes.storage


@functools.lru_cache(maxsize=64)
def units(case: Case) -> tuple[Unit, ...]:
    """Every wrapped unit and the root with their parameters, in forward order, the root first."""
    owned: dict[str, list[str]] = {name: [] for name in ("", *unit_names(case))}
    for name in parameter_names(case.model):
        owned[unit_of(case, name)].append(name)
    return tuple(Unit(name=unit, parameters=tuple(names)) for unit, names in owned.items())


def divide_factors(num_ranks: int) -> tuple[float, float]:
    """FSDP's division before and after a sum over `num_ranks`: about the square root each."""
    before = 1
    while num_ranks % before == 0 and num_ranks / before > before:
        before *= 2
    return float(before), num_ranks / before


def _around_sums(case: Case) -> tuple[Level, ...]:
    before, after = divide_factors(case.mesh.world_size)
    shards, replicas = case.mesh.shards, case.mesh.replicas
    if case.mesh.ndim == 1:
        return (Level(axis="shard", size=shards, before=before, after=after),)
    return (
        Level(axis="shard", size=shards, before=before),
        Level(axis="replicate", size=replicas, after=after),
    )


def _averages(case: Case) -> tuple[Level, ...]:
    shards = Level(axis="shard", size=case.mesh.shards, after=float(case.mesh.shards))
    if case.mesh.ndim == 1:
        return (shards,)
    replicas = case.mesh.replicas
    return (shards, Level(axis="replicate", size=replicas, after=float(replicas)))

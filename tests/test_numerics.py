"""The numerics that plain torch FSDP1 and FSDP2 declare, pinned."""

from __future__ import annotations

from fsdp_engine.adapters.numerics import divide_factors, fsdp1_numerics, fsdp2_numerics
from fsdp_engine.contract.case import DTYPE_POLICIES
from fsdp_engine.contract.observation import Level
from tests.world_cases import world_case


def test_division_factors_are_about_the_square_root() -> None:
    table = {1: (1, 1), 2: (2, 1), 3: (2, 1.5), 4: (2, 2), 6: (4, 1.5), 12: (4, 3), 32: (8, 4)}
    assert {n: divide_factors(n) for n in table} == table


def test_declared_numerics() -> None:
    mixed = DTYPE_POLICIES["fp32/bf16/fp32"]
    one = fsdp1_numerics(world_case("fsdp1", mesh=(2, 2), dtypes=mixed, deferred=True))
    two = fsdp2_numerics(world_case("fsdp2", mesh=(2, 2), dtypes=mixed, deferred=True))
    assert (one.local_accumulate, two.local_accumulate) == ("bfloat16", "float32")
    assert one.levels == (
        Level(axis="shard", size=2, before=2.0),
        Level(axis="replicate", size=2, after=2.0),
    )
    assert two.levels == (
        Level(axis="shard", size=2, after=2.0),
        Level(axis="replicate", size=2, after=2.0),
    )
    fp64 = fsdp2_numerics(world_case("fsdp2", mesh=(3,), dtypes=DTYPE_POLICIES["fp64"]))
    assert fp64.levels == (Level(axis="shard", size=3, before=2.0, after=1.5),)
    names = [unit.name for unit in one.units]
    assert names == ["", "layers.0"]

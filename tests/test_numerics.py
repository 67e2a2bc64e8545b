"""What adapters declare is pinned, and a dtype narrower than the one in use is never believed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from fsdp_engine.adapters.numerics import divide_factors, fsdp1_numerics, fsdp2_numerics
from fsdp_engine.contract.case import DTYPE_POLICIES, Dtype, Strategy
from fsdp_engine.contract.errors import EngineLoadError
from fsdp_engine.contract.model import Model
from fsdp_engine.contract.observation import Level
from fsdp_engine.world.pool import WorldPool
from oracles.rounding import holds
from properties.checks.gradients import match_oracle
from tests import golden_numerics
from tests.small_cases import small_case
from tests.world_cases import world_case
from tests.wrong_reductions import Shown

MODEL = Model(family="mlp", width=5, hidden=7, vocab=3, bias=True)
FIELDS = ("storage", "compute", "reduce", "local_accumulate", "shard_accumulate")
DTYPES: tuple[Dtype, ...] = ("float64", "float32", "bfloat16", "float16")


@pytest.mark.parametrize("name", golden_numerics.SHIPPED)
def test_what_every_adapter_declares_is_pinned(name: str) -> None:
    """After a change that is meant: `python -m tests.golden_numerics`, and read the difference."""
    try:
        declared = list(golden_numerics.lines(name))
    except EngineLoadError as error:
        pytest.skip(str(error))  # it has an environment of its own
    assert declared == golden_numerics.path_of(name).read_text().splitlines()


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


@pytest.fixture(scope="module", params=["fsdp1", "fsdp2"])
def plain(request: pytest.FixtureRequest) -> Iterator[tuple[Strategy, WorldPool]]:
    strategy: Strategy = request.param
    with WorldPool(f"torch_{strategy}") as pool:
        yield strategy, pool


@pytest.mark.parametrize("deferred", [False, True], ids=["eager", "deferred"])
@pytest.mark.parametrize(("size", "policy"), [*((2, name) for name in DTYPE_POLICIES), (4, "fp32")])
def test_no_narrower_dtype_is_believed(
    plain: tuple[Strategy, WorldPool], size: int, policy: str, *, deferred: bool
) -> None:
    """Real ranks whose engine declares less than it computes with: no allowance is gained.

    Two ranks are judged bit for bit as well; for four there is nothing but the bound.
    """
    strategy, pool = plain
    case = small_case(
        shape=(size,),
        model=MODEL,
        policy=policy,
        micro_batches=2,
        deferred=deferred,
        strategy=strategy,
    )
    observation = pool(case)
    honest = match_oracle(case, Shown(observation))
    assert honest.passed
    for field in FIELDS:
        declared: Dtype = getattr(observation.numerics, field)
        for dtype in DTYPES:
            if not holds(declared, dtype) or dtype == declared:
                continue
            numerics = replace(observation.numerics, **{field: dtype})  # type: ignore[arg-type]  # a field by name
            verdict = match_oracle(case, Shown(replace(observation, numerics=numerics)))
            if field == "local_accumulate" and not deferred:
                assert verdict == honest  # nothing is added up locally, so it says nothing
            else:
                assert verdict.outcome == "fail", (field, dtype)

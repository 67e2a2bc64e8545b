"""The same drawn cases on every engine that is installed here: engines that are right agree."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import TypeAlias, cast

import pytest
from hypothesis import given, settings
from torch import Tensor, equal

from fsdp_engine.contract.case import Case
from fsdp_engine.contract.errors import UnsupportedCase
from fsdp_engine.contract.model import Model
from fsdp_engine.world.pool import WorldPool
from fsdp_engine.world.registry import BUILT_IN, OPTIONAL, load_engine
from oracles.assembly import assemble
from oracles.evaluation import Evaluator
from oracles.records import train_actions
from properties.catalog import load_check
from properties.covering import Axes
from properties.outcome import ending_of
from properties.strategies.cases import exact_cases
from tests.world_cases import world_case

LIBRARIES = {"torch_ddp": "torch", "lightning": "lightning_fabric"}
INSTALLED = tuple(name for name in OPTIONAL if find_spec(LIBRARIES.get(name, name)) is not None)

Pools: TypeAlias = dict[str, WorldPool]


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    pools = {name: WorldPool(name, case_timeout_s=60) for name in (*BUILT_IN, *INSTALLED)}
    yield pools
    for pool in pools.values():
        pool.close()


def _gradients(case: Case, pool: WorldPool) -> dict[str, Tensor] | None:
    """The full gradients of every training action, None where the engine declines the case."""
    try:
        observation = pool(case)
    except UnsupportedCase:
        return None
    shapes = {name: tuple(value.shape) for name, value in Evaluator(case).weights.items()}
    full: dict[str, Tensor] = {}
    for action in train_actions(case, observation):
        parts = [record.gradients for record in action.records]
        assembled = assemble(parts, mesh=case.mesh, shapes=shapes, where="gradient")
        assert not assembled.mismatches
        for name, gradient in assembled.full.items():
            if gradient is not None:
                full[f"{action.index} {name}"] = gradient
    return full


@pytest.mark.parametrize(
    ("row", "least"),
    [
        (Axes(), 3),
        (Axes(sync="deferred", dtypes="fp64"), 3),
        (Axes(strategy="fsdp1", kind="mlp"), 3),
        (Axes(strategy="fsdp2", mesh="grid", dtypes="fp32/bf16/fp32"), 2),
        (Axes(mesh="column", sync="deferred", kind="mlp"), 2),
    ],
    ids=lambda value: str(value) if isinstance(value, Axes) else "",
)
def test_engines_agree_bit_for_bit_where_sums_are_exact(
    pools: Pools, row: Axes, least: int
) -> None:
    """The same drawn case on every engine: its id, and so its data, does not depend on whom."""
    check = load_check("gradient-is-exact")

    @settings(max_examples=2, derandomize=True, database=None, deadline=None)
    @given(case=exact_cases(row))
    def agree(case: Case) -> None:
        if case.engine.config_source != "dataclass":
            return
        right = [
            name
            for name, pool in pools.items()
            if _gradients(case, pool) is not None and ending_of(check, case, pool).verdict.passed
        ]
        first, *others = (cast(dict[str, Tensor], _gradients(case, pools[name])) for name in right)
        assert len(right) >= least, right
        for name, other in zip(right[1:], others, strict=True):
            assert other.keys() == first.keys(), (name, right[0])
            assert all(equal(other[key], first[key]) for key in first), (name, right[0])

    agree()


@pytest.mark.parametrize("name", INSTALLED)
def test_a_language_model_keeps_its_bounds(pools: Pools, name: str) -> None:
    """Within the bound of the same mean each, two engines differ by the sum of their bounds."""
    mesh = (2, 1) if name == "torch_ddp" else (2,)
    model = Model(family="qwen2", units=2, width=8, hidden=6, vocab=11)
    case = world_case("fsdp2", mesh=mesh, model=model, deferred=True)
    assert load_engine(name).supports(case) is None
    for judged in (name, "reference"):
        verdict = ending_of(load_check("gradient-matches-oracle"), case, pools[judged]).verdict
        assert verdict.passed, verdict.mismatches[:3]

"""The tables hold on real ranks: torch's own wrappers do what is predicted, to the last element."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator

import pytest

from fsdp_engine.contract.actions import Export, Infer, Train
from fsdp_engine.contract.batch import Batch, Sequence, Static, TokenBudget
from fsdp_engine.contract.case import DTYPE_POLICIES, Case, EngineOptions, Mesh, Strategy
from fsdp_engine.contract.model import Model
from fsdp_engine.world.pool import WorldPool
from oracles.verdict import Verdict
from properties.checks import communication, export, planner, residency
from tests.observed import Answers, worked_case

STRATEGIES: tuple[Strategy, ...] = ("fsdp1", "fsdp2")
TABLES = (
    communication.reduces_every_unit,
    communication.same_in_every_group,
    communication.matches_schedule,
    residency.matches_strategy,
    residency.retained_bytes,
    planner.is_exact_partition,
)


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[Strategy, WorldPool]]:
    worlds: dict[Strategy, WorldPool] = {
        strategy: WorldPool(f"torch_{strategy}") for strategy in STRATEGIES
    }
    yield worlds
    for world in worlds.values():
        world.close()


def require(verdict: Verdict) -> None:
    assert verdict.passed, "\n".join(map(str, verdict.mismatches)) or verdict.reason


def hold(case: Case, pools: dict[Strategy, WorldPool]) -> None:
    once = Answers(observe=functools.cache(pools[case.engine.strategy]))
    for check in TABLES:
        require(check(case, once))


GRID = list(itertools.product(STRATEGIES, [(2,), (1, 2), (2, 2)], [True, False], [True, False]))


@pytest.mark.parametrize(("strategy", "shape", "reshard", "deferred"), GRID, ids=str)
def test_strategy_and_sync(
    strategy: Strategy,
    shape: tuple[int, ...],
    reshard: bool,  # noqa: FBT001  a row of the grid
    deferred: bool,  # noqa: FBT001
    pools: dict[Strategy, WorldPool],
) -> None:
    hold(worked_case(strategy=strategy, shape=shape, reshard=reshard, deferred=deferred), pools)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtypes", DTYPE_POLICIES)
def test_dtype_policies(strategy: Strategy, dtypes: str, pools: dict[Strategy, WorldPool]) -> None:
    hold(worked_case(strategy=strategy, dtypes=dtypes, deferred=True, reshard=False), pools)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "model",
    [
        Model(family="mlp", units=3, width=3, hidden=5),
        Model(family="mlp", units=3, frozen="first_unit"),
        Model(family="embedding", units=3, frozen="first_unit"),
        Model(family="embedding", units=2, bias=True, frozen="biases"),
        Model(family="embedding", units=2, tied=True, buffers=True),
        Model(family="mlp", units=2, lora_rank=2),
        Model(family="linear", width=1, hidden=1, vocab=1),
    ],
    ids=lambda model: f"{model.family}-{model.frozen}-{model.lora_rank}-{model.width}",
)
def test_models(strategy: Strategy, model: Model, pools: dict[Strategy, WorldPool]) -> None:
    for reshard in (True, False):
        hold(worked_case(strategy=strategy, model=model, deferred=True, reshard=reshard), pools)


@pytest.mark.parametrize("shape", [(1,), (1, 1), (2, 1)], ids=str)
def test_one_shard(shape: tuple[int, ...], pools: dict[Strategy, WorldPool]) -> None:
    hold(worked_case(shape=shape), pools)
    if len(shape) == 1:  # with a second axis FSDP1 never averages over it
        hold(worked_case(strategy="fsdp1", shape=shape), pools)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_unit_that_some_micro_batches_skip(
    strategy: Strategy, pools: dict[Strategy, WorldPool]
) -> None:
    ranks = tuple(
        tuple(Sequence(key=3 * rank + place, gated=place != 1) for place in range(3))
        for rank in range(2)
    )
    for optional in ("unit", "parameter"):
        case = Case(
            model=Model(family="embedding", units=3, optional=optional),
            engine=EngineOptions(strategy=strategy, planning=Static()),
            batches=(Batch(ranks=ranks),),
        )
        hold(case, pools)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_programs(strategy: Strategy, pools: dict[Strategy, WorldPool]) -> None:
    program = (Infer(), Train(step=True), Export(), Train(), Infer(), Train(step=True))
    case = worked_case(strategy=strategy, reshard=False, deferred=True, program=program)
    hold(case, pools)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_token_budgets(strategy: Strategy, pools: dict[Strategy, WorldPool]) -> None:
    lengths = ((3, 1, 2, 2, 1), (1, 1, 4), (2, 2))
    ranks = tuple(
        tuple(Sequence(key=10 * rank + place, length=n) for place, n in enumerate(own))
        for rank, own in enumerate(lengths)
    )
    for max_tokens in (4, 6, 16):
        case = Case(
            mesh=Mesh(shape=(3,)),
            engine=EngineOptions(strategy=strategy, planning=TokenBudget(max_tokens=max_tokens)),
            batches=(Batch(ranks=ranks),),
        )
        hold(case, pools)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
def test_exports(
    strategy: Strategy, shape: tuple[int, ...], pools: dict[Strategy, WorldPool]
) -> None:
    program = (Export(), Train(), Export(), Train(step=True), Export(), Export(), Infer())
    model = Model(family="embedding", units=2, width=3, tied=True, buffers=True)
    case = worked_case(strategy=strategy, shape=shape, model=model, program=program)
    for dtypes in ("fp32", "bf16/bf16/fp32"):
        typed = dataclasses.replace(case, dtypes=DTYPE_POLICIES[dtypes])
        for check in (export.match_oracle, export.staged_equals_unstaged, export.changes_nothing):
            require(check(typed, pools[strategy]))

"""What a case leaves in its ranks is never held against the next one's engine, nor passed over."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fsdp_engine.contract.actions import Eval, Export, Infer, Restore, Train
from fsdp_engine.contract.case import Mesh, Optimizer
from fsdp_engine.contract.errors import EngineRaised
from fsdp_engine.contract.model import Model
from fsdp_engine.world.pool import WorldPool
from properties.checks.gradients import match_oracle
from properties.judge import Judge, PropertyFailure
from properties.trial import Trial
from tests.small_cases import small_case
from tests.world_cases import pids_of

LEAKING = "tests.engines.leaking:"
CASE = small_case(shape=(2,), model=Model(family="mlp", width=5, hidden=3, vocab=4))
NEXT = replace(CASE, seed=12)


@pytest.mark.parametrize(
    ("engine", "before"),
    [
        ("LeavesAGlobal", "before it was fail (action 0 (train)"),
        ("LeavesAHook", "before it was fail (action 0 (train)"),
        ("LeavesAutocastOn", "before it was fail (action 0 (train)"),
        ("LeavesGradientsOff", "before it was fail (rank"),
    ],
)
def test_a_leak_is_told_as_such(tmp_path: Path, engine: str, before: str) -> None:
    with WorldPool(LEAKING + engine) as pool:
        judge = Judge(
            trial=Trial(worlds=pool, engine=engine, known_issues=()), repro_folder=tmp_path
        )
        judge(match_oracle, CASE)
        with pytest.raises(PropertyFailure) as caught:
            judge(match_oracle, NEXT)
        pool.close()
        judge(match_oracle, replace(CASE, seed=13))
    assert type(caught.value).__name__.endswith("Flaked")
    told = "state leak or flake: the same case in a fresh world is pass; "
    assert told + before in str(caught.value)
    (tally,) = judge.tallies.values()
    assert (tally.judged, tally.failed, tally.inconclusive) == (2, 0, 1)
    assert tally.verdict == "inconclusive"


def test_what_surrounds_a_case_does_not_reach_it() -> None:
    """Another default dtype, random state or number of threads: the same bits as in a new world."""
    model = Model(family="llama", width=8, hidden=8, vocab=7)
    case = replace(CASE, model=model)
    with WorldPool(LEAKING + "ChangesItsSurroundings") as pool:
        for before in (CASE, case):
            pool(before)
        assert pool(case) == pool.fresh(case)
        assert match_oracle(case, pool).passed


def test_output_that_nobody_reads_holds_nothing_up() -> None:
    with WorldPool(LEAKING + "Noisy") as pool:
        first = pool(CASE)
        pids = pids_of(pool)
        assert pool(CASE) == first
        assert pids_of(pool) == pids


def test_a_rank_that_cannot_build_is_told_while_the_others_wait() -> None:
    with (
        WorldPool(LEAKING + "RaisesInBuild") as pool,
        pytest.raises(EngineRaised, match="rank 1 cannot build") as raised,
    ):
        pool(CASE)
    assert raised.value.kinds == {1: "ArithmeticError"}
    assert raised.value.num_collectives == {1: 0}


@pytest.mark.parametrize("optimizer", [Optimizer(kind="sgd"), Optimizer(kind="adamw")])
@pytest.mark.parametrize("model", [Model(family="mlp"), Model(family="qwen2", lora_rank=1)])
def test_process_groups_end_with_their_case(model: Model, optimizer: Optimizer) -> None:
    """Each keeps threads that poll; DTensor's caches would keep the groups of every new mesh."""
    program = (Train(step=True), Export(), Infer(), Eval(), Train(step=True), Restore(), Train())
    case = replace(small_case(shape=(2,), model=model), program=program, optimizer=optimizer)
    with WorldPool("reference") as pool:
        threads = []
        for seed, shape in enumerate(((2,), (2, 1), (1, 2), (2,), (2, 1))):
            pool(replace(case, mesh=Mesh(shape=shape), seed=seed))
            pool.tables()  # answered by rank 0 when it has cleaned up
            threads.append(len(list(Path(f"/proc/{pids_of(pool)[0]}/task").iterdir())))
    assert len(set(threads)) == 1, threads

"""Worlds of real rank processes: what they report when all goes well, and when it does not."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from fsdp_engine.contract.actions import Export, Infer, Train
from fsdp_engine.contract.case import Strategy
from fsdp_engine.contract.errors import (
    EngineLoadError,
    EngineRaised,
    RankDied,
    RankHung,
    UnsupportedCase,
    WorldError,
)
from fsdp_engine.contract.observation import Observation, TrainRecord
from fsdp_engine.world.pool import WorldPool
from tests.engines.misbehaving import BAD_SEED
from tests.engines.slow_import import IMPORT_TIME_S
from tests.world_cases import pids_of, wait_until_gone, world_case

MISBEHAVING = "tests.engines.misbehaving:"
HANG_TIMEOUT_S = 5.0
LONG_S = 60.0
PROGRAM = (Train(step=True), Infer(), Export(), Train())


def notes(observation: Observation, rank: int = 0) -> tuple[str, ...]:
    record = observation.ranks[rank].records[0]
    assert isinstance(record, TrainRecord)
    return record.notes


@pytest.fixture(scope="module")
def remembering() -> Iterator[WorldPool]:
    with WorldPool(MISBEHAVING + "Remembers") as pool:
        yield pool


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2)])
def test_warm_and_fresh_worlds_observe_the_same(strategy: Strategy, mesh: tuple[int, ...]) -> None:
    case = world_case(strategy, mesh=mesh, program=PROGRAM)
    with WorldPool(f"torch_{strategy}") as pool:
        first = pool(case)
        assert pool(case) == first
        assert pool.fresh(case) == first
        assert [rank.rank for rank in first.ranks] == list(range(case.mesh.world_size))


def test_a_large_world_serves_smaller_cases(remembering: WorldPool) -> None:
    remembering(world_case(mesh=(3,)))
    pids = pids_of(remembering)
    small = remembering(world_case(mesh=(2,)))
    assert pids_of(remembering) == pids
    assert len(small.ranks) == 2


def test_a_world_is_replaced_after_an_exception(remembering: WorldPool) -> None:
    remembering.close()
    assert notes(remembering(world_case()))[0] == "build 1 of this process"
    assert notes(remembering(world_case()))[0] == "build 2 of this process"
    with pytest.raises(EngineRaised) as raised:
        remembering(world_case(seed=BAD_SEED))
    assert raised.value.kinds == {0: "ArithmeticError", 1: "ArithmeticError"}
    assert all(count > 0 for count in raised.value.num_collectives.values())
    assert "every rank raises" in raised.value.by_rank[1]
    assert notes(remembering(world_case()))[0] == "build 1 of this process"


def test_fresh_worlds_share_nothing(remembering: WorldPool) -> None:
    for _ in range(2):
        assert notes(remembering.fresh(world_case()))[0] == "build 1 of this process"


def test_one_raising_rank_is_reported_while_the_others_wait() -> None:
    with (
        WorldPool(MISBEHAVING + "RaisesOnOneRank") as pool,
        pytest.raises(EngineRaised, match="only rank 1 raises") as raised,
    ):
        pool(world_case(seed=BAD_SEED))
    assert raised.value.kinds == {1: "ArithmeticError"}


def test_a_refused_configuration_is_told_by_its_kind() -> None:
    with (
        WorldPool(MISBEHAVING + "RefusesItsConfiguration") as pool,
        pytest.raises(EngineRaised) as raised,
    ):
        pool(world_case())
    assert raised.value.kinds == {0: "ConfigError", 1: "ConfigError"}
    assert raised.value.num_collectives == {0: 0, 1: 0}


def test_what_is_no_plain_data_is_told_in_words() -> None:
    with WorldPool(MISBEHAVING + "ReturnsATensor") as pool, pytest.raises(EngineRaised) as raised:
        pool(world_case())
    assert "Tensor is not plain data" in str(raised.value)


def test_only_supports_makes_a_case_unsupported() -> None:
    with WorldPool(MISBEHAVING + "RefusesCases") as pool:
        for _ in range(2):
            with pytest.raises(UnsupportedCase, match="this engine supports nothing"):
                pool(world_case())


def test_a_rank_that_kills_itself_is_noticed() -> None:
    with WorldPool(MISBEHAVING + "KillsItself", case_timeout_s=LONG_S) as pool:
        with pytest.raises(RankDied) as died:
            pool(world_case(mesh=(3,), seed=BAD_SEED))
        assert died.value.exit_codes == {1: -signal.SIGKILL}
        assert set(died.value.stacks) == {0, 2}
        pool(world_case(mesh=(3,)))


def test_a_rank_killed_from_outside_is_noticed_and_replaced(remembering: WorldPool) -> None:
    observation = remembering(world_case())
    pid = int(notes(observation, rank=1)[1].removeprefix("pid "))
    os.kill(pid, signal.SIGKILL)
    wait_until_gone([pid])
    with pytest.raises(RankDied) as died:
        remembering(world_case())
    assert died.value.exit_codes == {1: -signal.SIGKILL}
    assert remembering(world_case()).ranks[0].initial == observation.ranks[0].initial


def test_a_rank_killed_while_it_runs_ends_the_case_at_once() -> None:
    with WorldPool(MISBEHAVING + "Hangs", case_timeout_s=LONG_S) as pool:
        pool(world_case())
        victim = pids_of(pool)[1]
        killer = threading.Timer(0.5, os.kill, (victim, signal.SIGKILL))
        killer.start()
        with pytest.raises(RankDied):
            pool(world_case(seed=BAD_SEED))
        killer.join()


def test_a_hang_shows_every_stack_and_where_the_ranks_part() -> None:
    with WorldPool(MISBEHAVING + "Hangs", case_timeout_s=HANG_TIMEOUT_S) as pool:
        pool(world_case(mesh=(3,)))
        with pytest.raises(RankHung) as hung:
            pool(world_case(mesh=(3,), seed=BAD_SEED))
        assert set(hung.value.stacks) == {0, 1, 2}
        assert all("forward_backward" in stack for stack in hung.value.stacks.values())
        assert "misbehave" in hung.value.stacks[1]
        assert "misbehave" not in hung.value.stacks[0]
        assert hung.value.divergence == (
            "rank 1 is before the first collective; the others are in all_reduce #0 on axis shard"
        )
        pool(world_case(mesh=(3,)))


def test_a_hang_in_unlike_collectives_names_them() -> None:
    with WorldPool(MISBEHAVING + "Desynchronised", case_timeout_s=HANG_TIMEOUT_S) as pool:
        pool(world_case(mesh=(3,)))
        with pytest.raises(RankHung) as hung:
            pool(world_case(mesh=(3,), seed=BAD_SEED))
    assert hung.value.divergence == (
        "rank 1 is in broadcast #0 on axis shard; the others are in all_reduce #0 on axis shard"
    )


def test_a_rank_that_holds_the_interpreter_still_shows_its_stack() -> None:
    with WorldPool(MISBEHAVING + "HoldsTheInterpreter", case_timeout_s=HANG_TIMEOUT_S) as pool:
        pool(world_case())
        with pytest.raises(RankHung) as hung:
            pool(world_case(seed=BAD_SEED))
    assert "misbehave" in hung.value.stacks[1]


def test_start_up_is_not_case_time() -> None:
    with WorldPool("tests.engines.slow_import:Slow", case_timeout_s=IMPORT_TIME_S - 1.0) as pool:
        assert len(pool(world_case()).ranks) == 2


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ("nonsense", r"unknown engine 'nonsense'; legal is .* torch_fsdp1, torch_fsdp2"),
        ("tests.engines.missing:Engine", r"there is no module tests\.engines\.missing"),
        (MISBEHAVING + "Missing", r"has no class 'Missing'"),
        ("tests.engines.broken_import:Engine", r"raised RuntimeError: this engine needs"),
    ],
)
def test_an_engine_that_cannot_be_loaded(engine: str, message: str) -> None:
    with WorldPool(engine) as pool:
        with pytest.raises(EngineLoadError, match=message):
            pool(world_case())
        with pytest.raises(EngineLoadError, match=message):
            pool.tables()


def test_tables_need_no_ranks() -> None:
    with WorldPool("torch_fsdp1") as pool:
        tables = pool.tables(strategies=((1, True), (2, False), (3, True)))
    assert tables.capabilities.name == "torch_fsdp1"
    assert [answer.value for answer in tables.strategies] == [
        "FULL_SHARD",
        "_HYBRID_SHARD_ZERO2",
        None,
    ]
    assert tables.strategies[2].error_kind == "NotImplementedError"
    assert "ndim 3" in str(tables.strategies[2].error)


def test_nonsense_on_the_wire_is_a_world_error() -> None:
    with WorldPool("torch_fsdp2") as pool:
        pool(world_case())
        assert pool._warm is not None
        pool._warm._ranks[0].commands.sendall(b"\x02\x00\x00\x00{}")
        with pytest.raises((WorldError, RankDied)):
            pool(world_case())
        assert len(pool(world_case()).ranks) == 2

"""Worlds of real rank processes: what they report when all goes well, and when it does not."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp_engine.contract.case import Export, Infer, Strategy, Train
from fsdp_engine.contract.errors import (
    EngineLoadError,
    EngineRaised,
    RankDied,
    RankHung,
    UnsupportedCase,
    WorldError,
)
from fsdp_engine.contract.observation import Observation, TrainRecord
from fsdp_engine.world import processes
from fsdp_engine.world.pool import WorldPool
from tests.engines.misbehaving import BAD_SEED
from tests.engines.slow_import import IMPORT_TIME_S
from tests.world_cases import world_case

MISBEHAVING = "tests.engines.misbehaving:"
HANG_TIMEOUT_S = 5.0
LONG_S = 60.0
PROGRAM = (Train(step=True), Infer(), Export(), Train())


def notes(observation: Observation, rank: int = 0) -> tuple[str, ...]:
    record = observation.ranks[rank].records[0]
    assert isinstance(record, TrainRecord)
    return record.notes


def pids_of(pool: WorldPool) -> list[int]:
    assert pool._warm is not None
    return [rank.pid for rank in pool._warm._ranks]


def wait_until_gone(pids: list[int]) -> None:
    """Return when no process has these ids; fail where one is left after a long time."""
    for pid in pids:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        ended, _, _ = select.select([handle], [], [], LONG_S)
        os.close(handle)
        assert ended, f"process {pid} is left"


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


def test_nothing_is_left_after_close() -> None:
    pool = WorldPool("torch_fsdp2")
    pool(world_case())
    assert pool._warm is not None
    pids, directory = pids_of(pool), pool._warm._directory
    assert directory.stat().st_mode & 0o777 == 0o700
    assert not list(directory.glob("store*"))
    pool.close()
    wait_until_gone(pids)
    assert not directory.exists()


def test_ranks_listen_on_the_loopback_only(remembering: WorldPool) -> None:
    remembering(world_case())
    inodes = {
        link.readlink().name.removeprefix("socket:[").removesuffix("]")
        for pid in pids_of(remembering)
        for link in Path(f"/proc/{pid}/fd").iterdir()
    }
    listening = [
        fields[1].partition(":")[0]
        for table in ("tcp", "tcp6")
        for fields in map(str.split, Path(f"/proc/net/{table}").read_text().splitlines()[1:])
        if fields[3] == "0A" and fields[9] in inodes
    ]
    assert listening
    assert set(listening) == {"0100007F"}


CONTROLLER = """
import sys
from fsdp_engine.world import processes
from fsdp_engine.world.pool import WorldPool
from tests.world_cases import world_case

for address in sys.argv[1:]:
    processes.join(address)
pool = WorldPool("tests.engines.misbehaving:Hangs", case_timeout_s=600.0)
pool(world_case())
own = [process.pid for process in [processes.zygote().process] if process]
print(*own, *(rank.pid for rank in pool._warm._ranks), pool._warm._directory)
sys.stdout.flush()
pool(world_case(seed=666))
"""


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_ranks_end_with_their_controller(how: signal.Signals, *, joins: bool) -> None:
    addresses = [processes.zygote().address] if joins else []
    with subprocess.Popen(
        [sys.executable, "-c", CONTROLLER, *addresses],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=Path(__file__).parent.parent,
    ) as controller:
        assert controller.stdout is not None
        *pids, directory = controller.stdout.readline().split()
        controller.send_signal(how)
        assert controller.wait(LONG_S) != 0
    assert len(pids) == (2 if joins else 3)
    wait_until_gone([int(pid) for pid in pids])
    assert not Path(directory.decode()).exists()


def test_joining_an_address_where_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(WorldError, match="no process forks ranks at"):
        processes.join(str(tmp_path / "address"))


def test_nonsense_on_the_wire_is_a_world_error() -> None:
    with WorldPool("torch_fsdp2") as pool:
        pool(world_case())
        assert pool._warm is not None
        pool._warm._ranks[0].commands.sendall(b"\x02\x00\x00\x00{}")
        with pytest.raises((WorldError, RankDied)):
            pool(world_case())
        assert len(pool(world_case()).ranks) == 2

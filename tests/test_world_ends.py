"""What is left of a world when it, or its controller, is gone; and who may reach it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_engine.contract.errors import WorldError
from fsdp_engine.world import processes
from fsdp_engine.world.environment import INSIDE
from fsdp_engine.world.pool import WorldPool
from tests.world_cases import pids_of, wait_until_gone, world_case

LONG_S = 60.0


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


def test_ranks_listen_on_the_loopback_only() -> None:
    with WorldPool("torch_fsdp2") as pool:
        pool(world_case())
        listening = listening_addresses(pids_of(pool))
    assert listening
    assert set(listening) == {"0100007F"}


def listening_addresses(pids: list[int]) -> list[str]:
    """Addresses, in hexadecimal, that any of the processes listens on."""
    inodes = {
        link.readlink().name.removeprefix("socket:[").removesuffix("]")
        for pid in pids
        for link in Path(f"/proc/{pid}/fd").iterdir()
    }
    return [
        fields[1].partition(":")[0]
        for table in ("tcp", "tcp6")
        for fields in map(str.split, Path(f"/proc/net/{table}").read_text().splitlines()[1:])
        if fields[3] == "0A" and fields[9] in inodes
    ]


CONTROLLER = """
import signal
import sys
from fsdp_engine.world import processes
from fsdp_engine.world.pool import WorldPool
from tests.world_cases import world_case

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
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


def test_a_rank_starts_no_worlds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that starts worlds when it is imported would otherwise multiply without end."""
    monkeypatch.setenv(INSIDE, "1")
    with pytest.raises(WorldError, match="may not start worlds itself"):
        processes.start("cpu")

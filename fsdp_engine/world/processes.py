"""The controller's side of the zygote: start it once, fork ranks from it, learn of their exits."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from fsdp_engine.contract.errors import AcceleratorError, WorldError
from fsdp_engine.world.environment import INSIDE, environment

START_TIMEOUT_S = 120.0

_PR_SET_PDEATHSIG = 1


@dataclass(slots=True, kw_only=True)
class RankProcess:
    """One rank: its pid, the wire, and the socket whose closing ends it.

    `interrupt` has it write its stacks even where it does not let go of the interpreter.
    """

    pid: int
    commands: socket.socket
    life: socket.socket
    interrupt: Callable[[], None]


class Nursery(Protocol):
    """Where ranks come from: a zygote of this machine, or the places of a job on several.

    `capacity` is how many ranks there can be, None where nothing limits them; `shares_files`
    whether they all see the same files. `gone` where no more ranks come from it.
    """

    gone: bool

    @property
    def address(self) -> str: ...
    @property
    def capacity(self) -> int | None: ...
    @property
    def shares_files(self) -> bool: ...
    def fork_rank(self, *, directory: Path, rank: int, engine: str) -> RankProcess: ...
    def exit_code(self, pid: int, *, timeout_s: float) -> int | None: ...
    def end_ranks(self, pids: list[int]) -> None: ...
    def store(self, directory: Path, number: int) -> str:
        """Where the ranks of a world's case `number` meet: a new path, or `tcp://`."""

    def fetch(self, directory: Path, ranks: Iterable[int]) -> None:
        """Bring what ranks elsewhere wrote of themselves into `directory` on this machine."""

    def has_ended(self) -> bool: ...
    def stop(self) -> None: ...


@dataclass(slots=True, kw_only=True)
class Zygote:
    """A running zygote of this process, or, with `process` None, a fork of another process's.

    `address` is where other processes may `join`. `gone` once it is known to have ended.
    """

    process: subprocess.Popen[bytes] | None
    control: socket.socket
    address: str
    gone: bool = False
    exit_codes: dict[int, int] = field(default_factory=dict)
    _pending: bytes = b""

    @property
    def capacity(self) -> int | None:
        return None

    @property
    def shares_files(self) -> bool:
        return True

    def fork_rank(self, *, directory: Path, rank: int, engine: str) -> RankProcess:
        """Fork one rank; it says Ready on its own when the engine is imported."""
        commands, commands_there = socket.socketpair()
        life, life_there = socket.socketpair()
        request = {"directory": str(directory), "rank": rank, "engine": engine}
        try:
            pid = self.fork(request, commands_there, life_there)
        except WorldError:
            commands.close()
            life.close()
            raise
        return RankProcess(pid=pid, commands=commands, life=life, interrupt=partial(interrupt, pid))

    def fork(self, request: dict[str, object], commands: socket.socket, life: socket.socket) -> int:
        """The pid of a rank that was forked with these two sockets, which are closed here."""
        with commands, life:
            try:
                socket.send_fds(
                    self.control, [message_line(request)], [commands.fileno(), life.fileno()]
                )
                return self._await("forked", timeout_s=START_TIMEOUT_S)
            except (OSError, WorldError) as error:
                self.gone = True
                raise WorldError(f"the process that forks ranks does not: {error}") from error

    def store(self, directory: Path, number: int) -> str:
        return str(directory / f"store{number}")

    def fetch(self, directory: Path, ranks: Iterable[int]) -> None:
        """Everything is on this machine already."""

    def has_ended(self) -> bool:
        """Whether its process is known to have ended by itself."""
        return self.process is not None and self.process.poll() is not None

    def exit_code(self, pid: int, *, timeout_s: float) -> int | None:
        """How a rank ended (negative: by that signal); None where it is not known in time."""
        self.control.settimeout(timeout_s)
        try:
            while pid not in self.exit_codes:
                self._note(self._read())
        except (TimeoutError, WorldError):
            return None
        return self.exit_codes[pid]

    def end_ranks(self, pids: list[int]) -> None:
        """Kill ranks and wait until they are gone; nothing happens to those that are."""
        alive = [pid for pid in pids if pid not in self.exit_codes]
        if not alive:
            return
        with contextlib.suppress(OSError):
            self.control.sendall(message_line({"end": alive}))
        for pid in alive:
            self.exit_code(pid, timeout_s=5.0)

    def await_ready(self) -> None:
        """Wait until it has imported what it needs.

        Raises `WorldError` where that fails, `AcceleratorError` where it cannot have its device.
        """
        try:
            self._await("ready", timeout_s=START_TIMEOUT_S)
        except TimeoutError as error:
            raise WorldError("the process that forks ranks does not answer") from error

    def stop(self) -> None:
        """End the zygote, and with it every rank it forked."""
        self.gone = True
        self.control.close()
        if self.process is None:
            return
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(Path(self.address).parent, ignore_errors=True)

    def _await(self, what: str, *, timeout_s: float) -> int:
        self.control.settimeout(timeout_s)
        while what not in (message := self._read()):
            if "refused" in message:
                raise AcceleratorError(str(message["refused"]))
            self._note(message)
        return message[what]

    def _note(self, message: dict[str, int]) -> None:
        if "exited" in message:
            self.exit_codes[message["exited"]] = message["code"]

    def _read(self) -> dict[str, int]:
        """The next message. Raises `TimeoutError`, or `WorldError` where the zygote is gone."""
        while b"\n" not in self._pending:
            try:
                data = self.control.recv(4096)
            except TimeoutError:
                raise
            except OSError as error:
                self.gone = True
                raise WorldError(f"the process that forks ranks is gone: {error}") from error
            if not data:
                self.gone = True
                raise WorldError("the process that forks ranks is gone")
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        message: dict[str, int] = json.loads(line)
        return message


def die_with_parent(parent: int) -> None:
    """Ask the kernel to end this process with its parent; end at once if that is gone already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def interrupt(pid: int) -> None:
    """Have a rank of this machine write its stacks."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR1)


_running: dict[tuple[int, str], Nursery] = {}


def zygote(device: str = "cpu") -> Nursery:
    """Where this process's ranks come from on a device: a zygote that ends with the process.

    It is started at the first call, unless another nursery was put in its place by `use`.

    Raises:
        WorldError: it does not start.
        AcceleratorError: it cannot have the device.
    """
    running = _running.get((os.getpid(), device))
    if running is not None and running.has_ended():
        running.gone = True
    if running is None or running.gone:
        running = start(device)
        use(running, device)
    return running


def join(address: str, device: str = "cpu") -> None:
    """Use a fork of the zygote of another process, which listens at `address`.

    Raises:
        WorldError: nobody answers there.
    """
    control = socket.socket(socket.AF_UNIX)
    try:
        control.connect(address)
    except OSError as error:
        control.close()
        raise WorldError(f"no process forks ranks at {address}: {error}") from error
    joined = Zygote(process=None, control=control, address=address)
    try:
        joined.await_ready()
    except WorldError:
        control.close()
        raise
    use(joined, device)


def use(running: Nursery, device: str) -> None:
    """Ranks of this process come from there from now on."""
    _running[os.getpid(), device] = running
    atexit.register(running.stop)


def start(device: str) -> Zygote:
    """A new zygote, whoever uses it."""
    if INSIDE in os.environ:
        # Without this, a script that is imported by accident would start zygotes without end.
        raise WorldError("a rank, or the process that forks ranks, may not start worlds itself")
    here, there = socket.socketpair()
    # Created with mode 0700: nobody else may connect.
    address = str(Path(tempfile.mkdtemp(prefix="fsdp-zygote-")) / "address")
    arguments = [str(there.fileno()), address, device]
    with there:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "fsdp_engine.world.zygote", *arguments],
            pass_fds=[there.fileno()],
            env=environment(device),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    started = Zygote(process=process, control=here, address=address)
    try:
        started.await_ready()
    except AcceleratorError:
        started.stop()
        raise
    except WorldError as error:
        process.kill()
        code = process.wait()
        started.stop()
        raise WorldError(f"the process that forks ranks did not start (exit {code})") from error
    return started


def message_line(request: object) -> bytes:
    """A message to another process of ours: JSON, ended by a new line."""
    return json.dumps(request).encode() + b"\n"

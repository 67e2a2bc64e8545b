"""The controller's side of the zygote: start it once, fork ranks from it, learn of their exits."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from fsdp_engine.contract.errors import AcceleratorError, WorldError

START_TIMEOUT_S = 120.0
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"

INSIDE = "FSDP_PROPERTIES_INSIDE"
"""Set in the environment of the process that forks ranks, and so in theirs."""


@dataclass(slots=True, kw_only=True)
class RankProcess:
    """One rank: its pid, the wire, and the socket whose closing ends it."""

    pid: int
    commands: socket.socket
    life: socket.socket


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

    def fork_rank(self, *, directory: Path, rank: int, engine: str) -> RankProcess:
        """Fork one rank; it says Ready on its own when the engine is imported."""
        commands, commands_there = socket.socketpair()
        life, life_there = socket.socketpair()
        request = {"directory": str(directory), "rank": rank, "engine": engine}
        with commands_there, life_there:
            fds = [commands_there.fileno(), life_there.fileno()]
            try:
                socket.send_fds(self.control, [_line(request)], fds)
                pid = self._await("forked", timeout_s=START_TIMEOUT_S)
            except (OSError, WorldError) as error:
                commands.close()
                life.close()
                self.gone = True
                raise WorldError(f"the process that forks ranks does not: {error}") from error
        return RankProcess(pid=pid, commands=commands, life=life)

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
            self.control.sendall(_line({"end": alive}))
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


_running: dict[tuple[int, str], Zygote] = {}


def zygote(device: str = "cpu") -> Zygote:
    """This process's zygote for a device, started at the first call and ended with the process.

    Raises:
        WorldError: it does not start.
        AcceleratorError: it cannot have the device.
    """
    running = _running.get((os.getpid(), device))
    if running is not None and running.process is not None and running.process.poll() is not None:
        running.gone = True
    if running is None or running.gone:
        running = _start(device)
        _keep(running, device)
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
    _keep(joined, device)


def _keep(running: Zygote, device: str) -> None:
    _running[os.getpid(), device] = running
    atexit.register(running.stop)


def _start(device: str) -> Zygote:
    if INSIDE in os.environ:
        # Without this, a script that is imported by accident would start zygotes without end.
        raise WorldError("a rank, or the process that forks ranks, may not start worlds itself")
    here, there = socket.socketpair()
    search_path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    environment = os.environ | {
        "PYTHONPATH": search_path,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": _LOOPBACK,
        "TORCH_GLOO_LAZY_INIT": "1",  # ranks that never talk to each other do not connect
        INSIDE: "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    # Created with mode 0700: nobody else may connect.
    address = str(Path(tempfile.mkdtemp(prefix="fsdp-zygote-")) / "address")
    arguments = [str(there.fileno()), address, device]
    with there:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "fsdp_engine.world.zygote", *arguments],
            pass_fds=[there.fileno()],
            env=environment,
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


def _line(request: object) -> bytes:
    return json.dumps(request).encode() + b"\n"

"""Ranks in the processes of a torchrun job: on one machine or many, as many as the job has.

Every process of the job is a place for one rank. That of rank 0 is the controller, which runs the
session; each other one serves: it forks its rank from a zygote of its own when the controller asks,
as often as it asks, and the rank talks to the controller by two TCP connections. So worlds are
fresh or warm, watched and replaced as on one machine, and one smaller than the job uses its first
places.

The controller's address and the secret that a connection shows are in the job's store, where the
ranks of a case also meet.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import json
import os
import secrets
import socket
import tempfile
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fsdp_engine.contract.errors import WorldError
from fsdp_engine.world.paths import log_path, output_path, stack_path
from fsdp_engine.world.processes import (
    START_TIMEOUT_S,
    Nursery,
    RankProcess,
    Zygote,
    die_with_parent,
    interrupt,
    message_line,
    start,
)

ANSWER_TIMEOUT_S = 20.0
"""How long a place may take for anything but a fork."""

_ADDRESS, _SECRET = "fsdp_properties/address", "fsdp_properties/secret"
_KEEPALIVE_S = 5
"""A machine that is gone without a word is noticed after three times this."""


def in_job() -> bool:
    """Whether this process was started by torchrun."""
    return "RANK" in os.environ and "MASTER_PORT" in os.environ


@dataclass(slots=True)
class _Place:
    """The controller's line to one other process of the job."""

    rank: int
    stream: socket.socket
    host: str
    _pending: bytes = b""

    def ask(self, request: dict[str, Any], *, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
        """What it answers. Raises `WorldError` where it is gone or does not answer in time."""
        try:
            self.stream.settimeout(timeout_s)
            self.stream.sendall(message_line(request))
            message, self._pending = _read_line(self.stream, self._pending)
        except (OSError, EOFError) as error:
            self.stream.close()
            raise WorldError(f"rank {self.rank} of the job, on {self.host}, is gone") from error
        if "error" in message:
            raise WorldError(f"rank {self.rank} of the job: {message['error']}")
        return message["answer"]

    @property
    def is_gone(self) -> bool:
        """Whether the line is closed, by whoever."""
        if self.stream.fileno() < 0:
            return True
        try:
            self.stream.settimeout(0)
            return self.stream.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True


@dataclass(slots=True)
class Places:
    """The nursery of a job: rank r of a world is forked by process r of the job."""

    own: Nursery
    others: list[_Place]
    shares_files: bool
    _listener: socket.socket
    _secret: str
    _prefix: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    _num_stores: int = 0
    gone: bool = False

    @property
    def address(self) -> str:
        """Nobody else may join."""
        return ""

    @property
    def capacity(self) -> int:
        return 1 + len(self.others)

    @property
    def lost(self) -> str:
        """The first process of the job that is gone, in words; empty while all are there."""
        for place in self.others:
            if place.is_gone:
                return f"rank {place.rank} of the job, on {place.host}, is gone"
        return ""

    def fork_rank(self, *, directory: Path, rank: int, engine: str) -> RankProcess:
        """Fork one rank at its place; it says Ready on its own when the engine is imported."""
        if lost := self.lost:
            raise WorldError(lost)
        if rank == 0:
            return self.own.fork_rank(directory=directory, rank=rank, engine=engine)
        place, token = self.others[rank - 1], secrets.token_hex(8)
        request = {"directory": str(directory), "rank": rank, "engine": engine}
        pid = place.ask({"fork": request, "token": token}, timeout_s=START_TIMEOUT_S)
        lines: dict[str, socket.socket] = {}
        while len(lines) < 2:
            stream, hello = _accept(self._listener, self._secret)
            if hello.get("token") == token:
                lines[hello["line"]] = stream
            else:
                stream.close()  # of a rank that was given up
        return RankProcess(
            pid=_handle(rank, pid),
            commands=lines["commands"],
            life=lines["life"],
            interrupt=partial(self._interrupt, place, pid),
        )

    def exit_code(self, pid: int, *, timeout_s: float) -> int | None:
        place, there = self._at(pid)
        if place is None:
            return self.own.exit_code(there, timeout_s=timeout_s)
        code: int | None = place.ask({"exit": there, "timeout_s": timeout_s})
        return code

    def end_ranks(self, pids: list[int]) -> None:
        """Kill ranks; those at places that are gone ended with them."""
        by_place: dict[int, list[int]] = {}
        for pid in pids:
            by_place.setdefault(pid >> 32, []).append(pid & 0xFFFFFFFF)
        for rank, there in by_place.items():
            if rank == 0:
                self.own.end_ranks(there)
            else:
                with contextlib.suppress(WorldError):
                    self.others[rank - 1].ask({"end": there})

    def store(self, directory: Path, number: int) -> str:  # noqa: ARG002  not a file
        self._num_stores += 1
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        return f"tcp://{address}/{self._prefix}/{self._num_stores}"

    def fetch(self, directory: Path, ranks: Iterable[int]) -> None:
        """Copy what the ranks elsewhere wrote: stacks, collectives, output."""
        if self.shares_files:
            return
        for rank in ranks:
            if rank:
                with contextlib.suppress(WorldError):
                    self._copy(self.others[rank - 1], directory, rank)

    def has_ended(self) -> bool:
        return False

    def stop(self) -> None:
        """Let the other processes of the job end."""
        self.gone = True
        for place in self.others:
            place.stream.close()
        self._listener.close()
        self.own.stop()

    def _copy(self, place: _Place, directory: Path, rank: int) -> None:
        paths = [name(directory, rank) for name in (stack_path, log_path, output_path)]
        contents = place.ask({"read": [str(path) for path in paths]})
        for path, content in zip(paths, contents, strict=True):
            path.write_bytes(base64.b64decode(content))

    def _at(self, pid: int) -> tuple[_Place | None, int]:
        rank, there = pid >> 32, pid & 0xFFFFFFFF
        return (self.others[rank - 1] if rank else None), there

    @staticmethod
    def _interrupt(place: _Place, pid: int) -> None:
        with contextlib.suppress(WorldError):
            place.ask({"interrupt": pid})


def open_places(device: str) -> Places:
    """In the process of rank 0: wait until every other process of the job has joined.

    Raises:
        WorldError: some have not within the time that a start may take.
    """
    store, _, world_size = next(dist.rendezvous("env://"))
    host = _own_address()
    listener = socket.create_server((host, 0))
    secret = secrets.token_hex(16)
    store.set(_SECRET, secret)
    store.set(_ADDRESS, f"{host} {listener.getsockname()[1]}")
    own = start(device)
    listener.settimeout(START_TIMEOUT_S)
    joined: dict[int, _Place] = {}
    while len(joined) < world_size - 1:
        try:
            stream, hello = _accept(listener, secret)
        except TimeoutError as error:
            missing = sorted(set(range(1, world_size)) - joined.keys())
            raise WorldError(f"ranks {missing} of the job have not joined") from error
        joined[hello["rank"]] = _Place(hello["rank"], stream, hello["host"])
    others = [joined[rank] for rank in range(1, world_size)]
    listener.settimeout(ANSWER_TIMEOUT_S)
    with tempfile.NamedTemporaryFile(prefix="fsdp-shared-") as file:
        shares_files = all(place.ask({"exists": file.name}) for place in others)
    return Places(own, others, shares_files, listener, secret)


def serve_place(device: str) -> None:
    """In every other process of the job: fork ranks for the controller until it is gone."""
    die_with_parent(os.getppid())
    store, rank, _ = next(dist.rendezvous("env://"))
    secret = store.get(_SECRET).decode()
    host, port = store.get(_ADDRESS).decode().split()
    own = start(device)
    connect = partial(_connect, host, int(port), secret)
    control = connect({"rank": rank, "host": socket.gethostname()})
    place = _Server(own, connect)
    pending = b""
    try:
        while True:
            request, pending = _read_line(control, pending)
            try:
                answer = {"answer": place.answer(request)}
            except (WorldError, OSError) as error:
                answer = {"error": str(error)}
            control.sendall(message_line(answer))
    except (EOFError, OSError):
        return
    finally:
        own.stop()


@dataclass(frozen=True, slots=True)
class _Server:
    """The answers of a place, whose ranks come from its `own` zygote."""

    own: Zygote
    connect: Callable[[dict[str, Any]], socket.socket]

    def answer(self, request: dict[str, Any]) -> Any:
        """Do what the controller asks."""
        match request:
            case {"fork": asked, "token": token}:
                Path(asked["directory"]).mkdir(mode=0o700, parents=True, exist_ok=True)
                lines = [
                    self.connect({"token": token, "line": name}) for name in ("commands", "life")
                ]
                return self.own.fork(asked, *lines)
            case {"exit": pid, "timeout_s": timeout_s}:
                return self.own.exit_code(pid, timeout_s=timeout_s)
            case {"end": pids}:
                return self.own.end_ranks(pids)
            case {"interrupt": pid}:
                return interrupt(pid)
            case {"exists": path}:
                return Path(path).exists()
            case {"read": paths}:
                return [base64.b64encode(_content(Path(path))).decode() for path in paths]
        raise WorldError(f"{request} is not understood")


def _content(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def _handle(rank: int, pid: int) -> int:
    """One number for a rank at another place: pids are of 32 bits at most."""
    return rank << 32 | pid


def _own_address() -> str:
    """Where the others of the job reach this process."""
    master = os.environ["MASTER_ADDR"]
    if master in ("localhost", "127.0.0.1", "::1"):
        return "127.0.0.1"
    return socket.gethostbyname(socket.gethostname())


def _connect(host: str, port: int, secret: str, hello: dict[str, Any]) -> socket.socket:
    stream = socket.create_connection((host, port), timeout=ANSWER_TIMEOUT_S)
    _notice_loss(stream)
    stream.sendall(message_line(hello | {"secret": secret}))
    stream.settimeout(None)
    return stream


def _accept(listener: socket.socket, secret: str) -> tuple[socket.socket, dict[str, Any]]:
    """The next connection that shows the secret, and what it says of itself."""
    while True:
        stream, _ = listener.accept()
        stream.settimeout(ANSWER_TIMEOUT_S)
        try:
            hello, rest = _read_line(stream, b"", one_by_one=True)
            assert not rest
            known = hmac.compare_digest(str(hello.get("secret")), secret)
        except (OSError, EOFError, ValueError):
            known, hello = False, {}
        if known:
            _notice_loss(stream)
            stream.settimeout(None)
            return stream, hello
        stream.close()


def _notice_loss(stream: socket.socket) -> None:
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 2)):
        option = getattr(socket, name, None)
        if option is not None:
            seconds = value if name == "TCP_KEEPCNT" else value * _KEEPALIVE_S
            stream.setsockopt(socket.IPPROTO_TCP, option, seconds)


def _read_line(
    stream: socket.socket, pending: bytes, *, one_by_one: bool = False
) -> tuple[dict[str, Any], bytes]:
    """The next message and what came behind it; byte by byte where that is not for here."""
    while b"\n" not in pending:
        data = stream.recv(1 if one_by_one else 1 << 16)
        if not data:
            raise EOFError("the other side is gone")
        pending += data
    line, _, rest = pending.partition(b"\n")
    message: dict[str, Any] = json.loads(line)
    return message, rest

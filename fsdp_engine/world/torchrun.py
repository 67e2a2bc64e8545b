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
import os
import secrets
import socket
import tempfile
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fsdp_engine.contract.errors import WorldError
from fsdp_engine.world.job_lines import ADDRESS, ANSWER_TIMEOUT_S, SECRET, accept, read_line
from fsdp_engine.world.paths import log_path, output_path, stack_path
from fsdp_engine.world.processes import (
    START_TIMEOUT_S,
    Nursery,
    RankProcess,
    message_line,
    start,
)


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
            message, self._pending = read_line(self.stream, self._pending)
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
            stream, hello = accept(self._listener, self._secret)
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
    store.set(SECRET, secret)
    store.set(ADDRESS, f"{host} {listener.getsockname()[1]}")
    own = start(device)
    listener.settimeout(START_TIMEOUT_S)
    joined: dict[int, _Place] = {}
    while len(joined) < world_size - 1:
        try:
            stream, hello = accept(listener, secret)
        except TimeoutError as error:
            missing = sorted(set(range(1, world_size)) - joined.keys())
            raise WorldError(f"ranks {missing} of the job have not joined") from error
        joined[hello["rank"]] = _Place(hello["rank"], stream, hello["host"])
    others = [joined[rank] for rank in range(1, world_size)]
    listener.settimeout(ANSWER_TIMEOUT_S)
    with tempfile.NamedTemporaryFile(prefix="fsdp-shared-") as file:
        shares_files = all(place.ask({"exists": file.name}) for place in others)
    return Places(own, others, shares_files, listener, secret)


def _handle(rank: int, pid: int) -> int:
    """One number for a rank at another place: pids are of 32 bits at most."""
    return rank << 32 | pid


def _own_address() -> str:
    """Where the others of the job reach this process."""
    master = os.environ["MASTER_ADDR"]
    if master in ("localhost", "127.0.0.1", "::1"):
        return "127.0.0.1"
    return socket.gethostbyname(socket.gethostname())

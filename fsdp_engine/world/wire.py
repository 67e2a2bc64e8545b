"""The conversation between a controller and its ranks: every message, and how it is framed.

A frame is a little-endian `uint32` length and a JSON header of that length, then the binary blobs
whose sizes the header lists. Nothing is ever unpickled or evaluated.
"""

from __future__ import annotations

import json
import socket
import struct
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

from fsdp_engine.contract.case import Case
from fsdp_engine.contract.codec import decode, encode
from fsdp_engine.contract.errors import CaseError, WorldError
from fsdp_engine.contract.observation import Numerics, RankObservation
from fsdp_engine.contract.protocol import EngineTables

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCase:
    """Run a case on the first ranks of the world, over a process group in `store`, a new path."""

    kind: Literal["run_case"] = "run_case"
    case: Case
    store: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndCase:
    """All ranks have answered: leave the case's process group. There is no reply."""

    kind: Literal["end_case"] = "end_case"


@dataclass(frozen=True, slots=True, kw_only=True)
class AskTables:
    """Answer what needs no ranks: see `EngineTables`."""

    kind: Literal["ask_tables"] = "ask_tables"
    mesh_shapes: tuple[tuple[int, int], ...]
    strategies: tuple[tuple[int, bool], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """End the rank process."""

    kind: Literal["stop"] = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The engine is imported and the rank waits for commands."""

    kind: Literal["ready"] = "ready"
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The case ran to its end on this rank; rank 0 adds the numerics the engine declares."""

    kind: Literal["done"] = "done"
    numerics: Numerics | None
    observation: RankObservation


@dataclass(frozen=True, slots=True, kw_only=True)
class TablesReply:
    """The answer to `AskTables`."""

    kind: Literal["tables"] = "tables"
    tables: EngineTables


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsupported:
    """The engine's `supports` refused the case with this reason, or it has not all its actions."""

    kind: Literal["unsupported"] = "unsupported"
    reason: str
    offered: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """An exception: its class name, its traceback and the collectives issued until then.

    Before `Ready` it means that the engine could not be loaded.
    """

    kind: Literal["failed"] = "failed"
    error: str
    message: str
    traceback: str
    num_collectives: int


Command: TypeAlias = RunCase | EndCase | AskTables | Stop
Reply: TypeAlias = Ready | Done | TablesReply | Unsupported | Failed


def prepare() -> None:
    """Build the decoders ahead of the first message."""
    decode(cast(Any, Command), encode(Stop()), where="message")
    decode(cast(Any, Reply), encode(Unsupported(reason="")), where="message")


def send(stream: socket.socket, message: Command | Reply) -> None:
    """Write one frame. Raises `OSError` where the other side is gone."""
    stream.sendall(frame(message))


def frame(message: Command | Reply) -> bytes:
    """The bytes of one message; the same frame may go to many ranks."""
    blobs: list[bytes] = []
    body = encode(message, blobs)
    header = json.dumps({"body": body, "sizes": [len(blob) for blob in blobs]}).encode()
    return b"".join([_LENGTH.pack(len(header)), header, *blobs])


def receive_command(stream: socket.socket) -> Command:
    """Read one command. Raises `EOFError` where the controller is gone."""
    return cast(Command, _receive(stream, Command))


def receive_reply(stream: socket.socket) -> Reply:
    """Read one reply. Raises `EOFError` where the rank is gone, `WorldError` for nonsense."""
    try:
        return cast(Reply, _receive(stream, Reply))
    except (CaseError, ValueError, KeyError) as error:
        raise WorldError(f"a rank's answer could not be read: {error}") from error


def _receive(stream: socket.socket, union: Any) -> object:
    (length,) = _LENGTH.unpack(_exactly(stream, _LENGTH.size))
    header = json.loads(_exactly(stream, length))
    blobs = tuple(_exactly(stream, size) for size in header["sizes"])
    return cast(object, decode(union, header["body"], where="message", blobs=blobs))


def _exactly(stream: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view = memoryview(data)
    filled = 0
    while filled < size:
        count = stream.recv_into(view[filled:])
        if count == 0:
            raise EOFError("the other side of the wire is gone")
        filled += count
    return bytes(data)

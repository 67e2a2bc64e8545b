"""A process of a torchrun job that serves: it forks its rank as often as the controller asks."""

from __future__ import annotations

import base64
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fsdp_engine.contract.errors import WorldError
from fsdp_engine.world.job_lines import ADDRESS, SECRET, connect, read_line
from fsdp_engine.world.processes import Zygote, die_with_parent, interrupt, message_line, start


def serve_place(device: str) -> None:
    """In every other process of the job: fork ranks for the controller until it is gone."""
    die_with_parent(os.getppid())
    store, rank, _ = next(dist.rendezvous("env://"))
    secret = store.get(SECRET).decode()
    host, port = store.get(ADDRESS).decode().split()
    own = start(device)
    join = partial(connect, host, int(port), secret)
    control = join({"rank": rank, "host": socket.gethostname()})
    place = _Server(own, join)
    pending = b""
    try:
        while True:
            request, pending = read_line(control, pending)
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
    join: Callable[[dict[str, Any]], socket.socket]

    def answer(self, request: dict[str, Any]) -> Any:
        """Do what the controller asks."""
        match request:
            case {"fork": asked, "token": token}:
                Path(asked["directory"]).mkdir(mode=0o700, parents=True, exist_ok=True)
                lines = [self.join({"token": token, "line": name}) for name in ("commands", "life")]
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

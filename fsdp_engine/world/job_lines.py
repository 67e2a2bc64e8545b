"""The TCP lines between the processes of a job: JSON, a message a line, shown a secret first."""

from __future__ import annotations

import hmac
import json
import socket
from typing import Any

from fsdp_engine.world.processes import message_line

ANSWER_TIMEOUT_S = 20.0
"""How long a place may take for anything but a fork."""

ADDRESS, SECRET = "fsdp_properties/address", "fsdp_properties/secret"
"""Where a job's store has the controller's address and the secret."""

_KEEPALIVE_S = 5
"""A machine that is gone without a word is noticed after three times this."""


def connect(host: str, port: int, secret: str, hello: dict[str, Any]) -> socket.socket:
    """A line to the controller, opened with the secret and what this process says of itself."""
    stream = socket.create_connection((host, port), timeout=ANSWER_TIMEOUT_S)
    _notice_loss(stream)
    stream.sendall(message_line(hello | {"secret": secret}))
    stream.settimeout(None)
    return stream


def accept(listener: socket.socket, secret: str) -> tuple[socket.socket, dict[str, Any]]:
    """The next connection that shows the secret, and what it says of itself."""
    while True:
        stream, _ = listener.accept()
        stream.settimeout(ANSWER_TIMEOUT_S)
        try:
            hello, rest = read_line(stream, b"", one_by_one=True)
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


def read_line(
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

"""Every copy to, from and on the device, in the order in which they were made."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

Direction: TypeAlias = Literal["host_to_device", "device_to_host", "device_to_device"]

_PACKAGE = str(Path(__file__).parent)


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One copy. `dtype` is the target's, in C++ words (`Float`, `BFloat16`).

    `blocking` as the caller asked for it. `implicit`: the value of a single element was read, as
    `.item()`, printing and comparing do. `site` is `file:line in function` of the innermost frame
    outside torch, where sites were asked for.
    """

    direction: Direction
    num_bytes: int
    dtype: str
    blocking: bool
    implicit: bool
    site: str = ""


class Ledger:
    """The copies that the device of this process has made."""

    def __init__(self, extension: Any) -> None:
        self._extension = extension

    def take(self) -> tuple[Copy, ...]:
        """The copies since the last call."""
        copies = self._extension.take_copies()
        return tuple(
            Copy(
                direction=direction,
                num_bytes=num_bytes,
                dtype=dtype,
                blocking=blocking,
                implicit=implicit,
                site=site,
            )
            for direction, num_bytes, dtype, blocking, implicit, site in copies
        )

    @contextmanager
    def with_sites(self) -> Iterator[None]:
        """Say inside where in Python each copy comes from. Costs a walk over the stack per copy."""
        self._extension.set_site(_site)
        try:
            yield
        finally:
            self._extension.set_site(None)


def _site() -> str:
    for frame in reversed(traceback.extract_stack()):
        if "/torch/" not in frame.filename and not frame.filename.startswith(_PACKAGE):
            return f"{frame.filename}:{frame.lineno} in {frame.name}"
    return ""

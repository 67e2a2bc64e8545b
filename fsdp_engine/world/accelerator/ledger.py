"""Every copy to, from and on the device, in the order in which they were made."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
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
    `.item()`, printing and comparing do. `label` is what `labelled` gave it.
    """

    direction: Direction
    num_bytes: int
    dtype: str
    blocking: bool
    implicit: bool
    label: str = ""


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
                label=label,
            )
            for direction, num_bytes, dtype, blocking, implicit, label in copies
        )

    @contextmanager
    def labelled(self, label: Callable[[], str]) -> Iterator[None]:
        """Ask `label` at every copy inside what to call it. It may be called from any thread."""
        self._extension.label_copies(label)
        try:
            yield
        finally:
            self._extension.label_copies(None)


def site() -> str:
    """A label: `file:line in function` of the innermost frame outside torch. Walks the stack."""
    for frame in reversed(traceback.extract_stack()):
        if "/torch/" not in frame.filename and not frame.filename.startswith(_PACKAGE):
            return f"{frame.filename}:{frame.lineno} in {frame.name}"
    return ""

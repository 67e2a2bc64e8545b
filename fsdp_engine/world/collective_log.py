"""One line per collective issued, kept outside the rank: says where a hung rank was.

A line is `issued NUMBER OPERATION AXIS GROUP_SIZE`; `finished NUMBER` follows when it is known.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fsdp_engine.contract.observation import Collective


class CollectiveLog:
    """The writing side; every line is on its way before the collective starts."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def start_case(self) -> None:
        os.ftruncate(self._file, 0)

    def issued(self, number: int, collective: Collective) -> None:
        words = (collective.operation, collective.axis, collective.group_size)
        self._write(f"issued {number} {' '.join(map(str, words))}")

    def finished(self, number: int) -> None:
        self._write(f"finished {number}")

    def _write(self, line: str) -> None:
        os.write(self._file, f"{line}\n".encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """One line of the log, read back."""

    operation: str
    axis: str
    group_size: int
    finished: bool


def read_log(path: Path) -> tuple[Issued, ...]:
    """What a rank has issued so far, in order; empty where it issued nothing."""
    text = path.read_text() if path.exists() else ""
    issued: dict[int, list[str]] = {}
    finished: set[int] = set()
    for line in text.splitlines():
        words = line.split()
        if words[0] == "issued" and len(words) == 5:
            issued[int(words[1])] = words[2:]
        elif words[0] == "finished" and len(words) == 2:
            finished.add(int(words[1]))
    return tuple(
        Issued(operation=w[0], axis=w[1], group_size=int(w[2]), finished=number in finished)
        for number, w in sorted(issued.items())
    )


def divergence(logs: Mapping[int, tuple[Issued, ...]]) -> str:
    """One sentence: at which collective the ranks first part."""
    shortest = min(len(log) for log in logs.values())
    for number in range(shortest):
        if len({_kind(log[number]) for log in logs.values()}) > 1:
            return _parted({rank: _place(log, number) for rank, log in logs.items()})
    return _parted({rank: _place(log, shortest) for rank, log in logs.items()})


def _place(log: tuple[Issued, ...], number: int) -> str:
    if number < len(log):
        return "in " + _name(log, number)
    if not log:
        return "before the first collective"
    state = "after" if log[-1].finished else "in"
    return f"{state} {_name(log, len(log) - 1)}"


def _name(log: tuple[Issued, ...], number: int) -> str:
    issued = log[number]
    return f"{issued.operation} #{number} on axis {issued.axis}"


def _kind(issued: Issued) -> tuple[str, str, int]:
    return issued.operation, issued.axis, issued.group_size


def _parted(places: dict[int, str]) -> str:
    if len(set(places.values())) == 1:
        return f"all ranks are {next(iter(places.values()))}"
    usual, _ = Counter(places.values()).most_common(1)[0]
    odd = [rank for rank, place in places.items() if place != usual]
    named = "; ".join(f"rank {rank} is {places[rank]}" for rank in odd)
    return f"{named}; the others are {usual}"

"""What can still be learnt from ranks that hang or died: stacks, collective logs, output."""

from __future__ import annotations

import re
import select
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

from fsdp_engine.contract.errors import RankHung
from fsdp_engine.world.collective_log import divergence, read_log
from fsdp_engine.world.paths import REPORT, log_path, output_path, stack_path
from fsdp_engine.world.processes import RankProcess

STACK_TIMEOUT_S = 1.0
"""How long ranks get to write their stacks and the state of their last collective."""

_THREAD = re.compile(r"^(?=(?:Current thread|Thread) 0x)", re.MULTILINE)
"""Where the stack of a thread begins."""

SIGNAL_TIMEOUT_S = 0.2
"""How long one that did not gets once it is forced to."""


Fetch: TypeAlias = Callable[[Path, Iterable[int]], None]
"""Brings the files of ranks into their directory on this machine; see `Nursery.fetch`."""


def hang(ranks: Sequence[RankProcess], directory: Path, timeout_s: float, fetch: Fetch) -> RankHung:
    """The error for ranks that did not answer in time, with every rank's stack."""
    numbered = dict(enumerate(ranks))
    stacks = collect_stacks(numbered, directory, fetch)
    where = parted(numbered, directory)
    return RankHung(f"no answer within {timeout_s:g} s: {where}", stacks=stacks, divergence=where)


def parted(ranks: Iterable[int], directory: Path) -> str:
    """One sentence: where the ranks' collective logs first differ."""
    return divergence({rank: read_log(log_path(directory, rank)) for rank in ranks})


def collect_stacks(
    ranks: Mapping[int, RankProcess], directory: Path, fetch: Fetch
) -> dict[int, str]:
    """Every rank's Python stacks, all threads; empty text where a rank cannot write them."""
    deadline = time.monotonic() + STACK_TIMEOUT_S
    asked = {rank: process for rank, process in ranks.items() if _ask(process)}
    for rank, process in asked.items():
        answered = select.select([process.life], [], [], max(0.0, deadline - time.monotonic()))[0]
        if not answered:
            _force(process, stack_path(directory, rank), partial(fetch, directory, (rank,)))
    fetch(directory, ranks)
    return {rank: _stacks(directory, rank) for rank in ranks}


def rank_output(directory: Path, rank: int) -> str:
    """The end of what a rank printed."""
    return _read(output_path(directory, rank))[-2000:]


def _ask(process: RankProcess) -> bool:
    try:
        process.life.sendall(REPORT)
    except OSError:
        return False
    return True


def _force(process: RankProcess, path: Path, fetch: Callable[[], None]) -> None:
    """A rank that does not let go of the interpreter still writes its stacks on a signal."""
    process.interrupt()
    waited = threading.Event()
    for _ in range(20):
        fetch()
        if _read(path):
            return
        waited.wait(SIGNAL_TIMEOUT_S / 20)


def _stacks(directory: Path, rank: int) -> str:
    # Two reports may follow each other: a rank that was forced to may answer as well.
    threads = _THREAD.split(_read(stack_path(directory, rank)))
    return "\n\n".join(
        thread.strip() for thread in threads if thread.strip() and " in _watch" not in thread
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return ""

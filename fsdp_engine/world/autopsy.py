"""What can still be learnt from ranks that hang or died: stacks, collective logs, output."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from fsdp_engine.contract.errors import RankHung
from fsdp_engine.world.collective_log import divergence, read_log
from fsdp_engine.world.paths import REPORT, log_path, output_path, stack_path
from fsdp_engine.world.processes import RankProcess

STACK_TIMEOUT_S = 1.0
"""How long ranks get to write their stacks and the state of their last collective."""


def hang(ranks: Sequence[RankProcess], directory: Path, timeout_s: float) -> RankHung:
    """The error for ranks that did not answer in time, with every rank's stack."""
    numbered = dict(enumerate(ranks))
    stacks = collect_stacks(numbered, directory)
    where = divergence({rank: read_log(log_path(directory, rank)) for rank in numbered})
    return RankHung(f"no answer within {timeout_s:g} s: {where}", stacks=stacks, divergence=where)


def collect_stacks(ranks: Mapping[int, RankProcess], directory: Path) -> dict[int, str]:
    """Every rank's Python stacks, all threads; empty text where a rank cannot write them."""
    asked = [rank for rank, process in ranks.items() if _ask(process)]
    deadline = time.monotonic() + STACK_TIMEOUT_S
    for rank in asked:
        select.select([ranks[rank].life], [], [], max(0.0, deadline - time.monotonic()))
    return {rank: _read(stack_path(directory, rank)) for rank in ranks}


def rank_output(directory: Path, rank: int) -> str:
    """The end of what a rank printed."""
    return _read(output_path(directory, rank))[-2000:]


def _ask(process: RankProcess) -> bool:
    try:
        os.kill(process.pid, signal.SIGUSR1)
        process.life.sendall(REPORT)
    except OSError:
        return False
    return True


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return ""

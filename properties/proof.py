"""A repro script is run before it is shown: twice, each time in a process that shares nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

RUN_TIMEOUT_S = 120.0
NUM_RUNS = 2

_KEPT = ("PATH", "HOME", "LANG", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
"""What of the environment a clean process still has."""

STATUS = {0: "FIXED", 1: "FAILED"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """How the runs of a script ended, and that of its control, where it has one.

    `line` is the verdict line of the first run that failed.
    """

    codes: tuple[int, ...]
    control: int | None
    line: str

    @property
    def holds(self) -> bool:
        """Whether every run showed the failure, and the control none."""
        return set(self.codes) == {1} and self.control in (None, 0)

    def __str__(self) -> str:
        if self.holds:
            told = f"verified {len(self.codes)}/{len(self.codes)}"
            return told + ("" if self.control is None else ", control passes")
        ended = ", ".join(STATUS.get(code, "ERROR") for code in self.codes)
        told = f"not verified: its runs ended {ended}"
        if self.control is not None:
            told += f", its control {STATUS.get(self.control, 'ERROR')}"
        return f"{told} ({self.line})" if self.line else told


def prove(script: Path, *, has_control: bool) -> Proof:
    """Run a script twice, and its control once, side by side."""
    commands: list[Sequence[str]] = [()] * NUM_RUNS + [("control",)] * has_control
    running = [_start(script, arguments) for arguments in commands]
    ended = [_end(process) for process in running]
    runs = ended[:NUM_RUNS]
    lines = [line for code, line in runs if code == 1] or [line for _, line in runs]
    return Proof(
        codes=tuple(code for code, _ in runs),
        control=ended[NUM_RUNS][0] if has_control else None,
        line=lines[0],
    )


def _start(script: Path, arguments: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(script.resolve()), *arguments],
        env={name: os.environ[name] for name in _KEPT if name in os.environ},
        cwd=script.parent,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )


def _end(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and first line; a run that takes too long is ended, with all its ranks."""
    try:
        printed, _ = process.communicate(timeout=RUN_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        printed, _ = process.communicate()
        return 2, f"no end within {RUN_TIMEOUT_S:g} s"
    lines = printed.strip().splitlines()
    return process.returncode, lines[0] if lines else ""

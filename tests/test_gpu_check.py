"""The GPU check itself: what it says without a GPU, of a step that fails and of one that hangs."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from fsdp_engine.world import device
from tests.gpu_check import __main__ as gpu_check
from tests.gpu_check.steps import Step

PYTHON = (sys.executable, "-c")


def _printing(name: str, code: int, *, wanted: int) -> Step:
    command = (*PYTHON, f"print('{name} it is'); raise SystemExit({code})")
    return Step(name=name, command=command, wanted=wanted)


def test_without_a_gpu_it_says_so_and_checks_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(device, "num_gpus", lambda: 0)
    assert gpu_check.main([]) == 2
    told = capsys.readouterr().out
    assert told.startswith("gpu-check: nothing was checked: torch ")
    assert "legal here are cpu and sim" in told


def test_one_step_that_fails_fails_it_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    well, ill = _printing("well", 1, wanted=1), _printing("ill", 3, wanted=0)
    assert gpu_check.check([well], tmp_path, seconds=60.0) == 0
    assert "gpu-check: all 1 steps were shown" in capsys.readouterr().out
    assert gpu_check.check([well, ill], tmp_path, seconds=60.0) == 1
    *_, first, second, verdict = capsys.readouterr().out.splitlines()
    assert first.split()[:2] == ["well", "ok"]
    assert first.endswith("well it is")
    assert second.endswith("exit code 3 instead of 0: ill it is")
    assert verdict == f"gpu-check: FAILED: ill; logs are in {tmp_path}"


def test_what_hangs_is_ended_with_all_that_it_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    child = "import subprocess, sys; print(1, flush=True); subprocess.run(['sleep', '1000'])"
    began = time.monotonic()
    late = [Step(name="hangs", command=(*PYTHON, child)), _printing("late", 0, wanted=0)]
    assert gpu_check.check(late, tmp_path, seconds=1.0) == 1
    assert time.monotonic() - began < 100
    told = capsys.readouterr().out
    assert "not over in time" in told
    assert "not begun: no time left" in told


@pytest.mark.parametrize("gpus", [1, 2])
def test_ranks_share_a_gpu_and_have_their_own_where_there_are_two(
    monkeypatch: pytest.MonkeyPatch, gpus: int
) -> None:
    monkeypatch.setattr(gpu_check, "num_gpus", lambda: gpus)
    names = [step.name for step in gpu_check.steps("cuda")]
    assert ("ranks-that-share" in names) == (gpus == 2)
    assert len(names) == len(set(names)) == 11 + (gpus == 2)

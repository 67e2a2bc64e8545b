"""What a run on GPUs must show, in one table: `make gpu-check`, at most eight minutes.

Every step is a process of its own, with its log below `.reports/gpu-check/`. Exits 0 where all was
shown, 1 where something was not, 2 where there is no GPU. `--device cpu` goes through the same
steps on the host, where they must all be shown as well.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fsdp_engine.contract.errors import AcceleratorError
from fsdp_engine.contract.protocol import DEVICES
from fsdp_engine.world.device import num_gpus, settle
from properties.repro import PROJECT
from tests.gpu_check.steps import Outcome, Step, judged, last_line, run, table

FOLDER = PROJECT / ".reports" / "gpu-check"
ENGINES = ("reference", "torch_fsdp2")
FAULT = "tests.faults.sync:AccumulatedInBf16"
ROW = "match_oracle and fsdp2 and deferred and fp32/bf16/fp32"
"""Where the fault shows."""

_PYTEST = ("-c", str(PROJECT / "pyproject.toml"), f"--rootdir={PROJECT}", "-p", "no:cacheprovider")
_SEEDED = ("--hypothesis-seed", "1")  # which also leaves the database of failures alone


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_check", description=__doc__)
    parser.add_argument("--device", choices=DEVICES, default="cuda")
    parser.add_argument("--minutes", type=float, default=8.0)
    options = parser.parse_args(arguments)
    try:
        settle(options.device)
    except AcceleratorError as error:
        sys.stdout.write(f"gpu-check: nothing was checked: {error}\n")
        return 2
    shutil.rmtree(FOLDER, ignore_errors=True)
    return check(steps(options.device), FOLDER, seconds=60.0 * options.minutes)


def check(todo: list[Step], root: Path, *, seconds: float) -> int:
    """Run the steps, print the table and one line of verdict; 0 where all are well."""
    began = time.monotonic()
    outcomes: list[Outcome] = []
    for step in todo:
        left = seconds - (time.monotonic() - began)
        outcomes.append(run(step, root, seconds_left=left))
        sys.stderr.write(f"{step.name}: {'ok' if outcomes[-1].ok else 'FAILED'}\n")
    took = time.monotonic() - began
    sys.stdout.write("\n".join(table(outcomes)) + "\n")
    failed = [one.name for one in outcomes if not one.ok]
    if failed:
        sys.stdout.write(f"gpu-check: FAILED: {', '.join(failed)}; logs are in {root}\n")
    else:
        sys.stdout.write(f"gpu-check: all {len(outcomes)} steps were shown in {took:.0f} s\n")
    return int(bool(failed))


def steps(device: str) -> list[Step]:
    """What there is to show on a device, the quickest first."""
    python = sys.executable
    found = [
        Step(name="ranks", command=(python, "-m", "tests.gpu_check.ranks", device)),
    ]
    if device == "cuda" and num_gpus() > 1:
        shared = {"CUDA_VISIBLE_DEVICES": "0"}
        command = (python, "-m", "tests.gpu_check.ranks", device)
        found.append(Step(name="ranks-that-share", command=command, environment=shared))
    found += [
        _simulated(),
        _job(device),
        *(_session(f"smoke-{engine}", "", engine, device) for engine in ENGINES),
    ]
    for here, there in (("cpu", device), (device, "cpu")):
        name = f"from-{here}-to-{there}" if here != there else "again"
        found.append(_finding(f"{name}-found", here))
        folder = FOLDER / f"{name}-found" / ".repro"
        found.append(_replay(f"{name}-faulty", folder, FAULT, there, wanted=1))
        found.append(_replay(f"{name}-clean", folder, ENGINES[1], there, wanted=0))
        if here == there:
            break
    return found


def _session(name: str, file: str, engine: str, device: str) -> Step:
    command = (
        *(sys.executable, "-m", "pytest", *_PYTEST, *_SEEDED, str(PROJECT / "properties" / file)),
        *("-n", "auto", "--profile", "smoke", "--engine", engine, "--device", device),
        *("--report-json", "report.json"),
    )
    return Step(name=name, command=command, says=judged)


def _simulated() -> Step:
    """A torch that is built for another accelerator must refuse it in words."""
    step = _session("simulated-device", "test_device.py", "reference", "sim")
    if torch.version.cuda is None:
        return step
    return replace(step, wanted=pytest.ExitCode.USAGE_ERROR, says=last_line)


def _job(device: str) -> Step:
    command = (
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
        *("-m", "properties.serve", *_PYTEST, *_SEEDED, "--profile", "smoke"),
        *(str(PROJECT / "properties" / "test_gradients.py"), "-k", "match_oracle"),
        *("--engine", ENGINES[1], "--device", device, "--report-json", "report.json"),
    )
    return Step(name="torchrun-job", command=command, says=judged)


def _finding(name: str, device: str) -> Step:
    """A planted fault must be found; what fails is kept in the step's folder."""
    command = (
        *(sys.executable, "-m", "pytest", *_PYTEST, *_SEEDED, "-x", "-n", "0", "-k", ROW),
        *(str(PROJECT / "properties" / "test_gradients.py"), "--engine", FAULT),
        *("--device", device, "--report-json", "report.json"),
    )
    return Step(name=name, command=command, wanted=1, says=judged)


def _replay(name: str, folder: Path, engine: str, device: str, *, wanted: int) -> Step:
    command = (
        *(sys.executable, "-m", "properties.replay", str(folder)),
        *("--engine", engine, "--device", device),
    )
    return Step(name=name, command=command, wanted=wanted)


if __name__ == "__main__":
    sys.exit(main())

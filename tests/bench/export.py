"""Exports of a model of 52 million parameters that rests on the host: staged beside unstaged.

Two processes with the simulated device each; what one of them counts. No value leaves it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist

from fsdp_engine.contract.actions import Export
from fsdp_engine.contract.case import Case, Strategy
from fsdp_engine.contract.model import Model
from fsdp_engine.engine.config import EngineConfig, OptimizerConfig
from fsdp_engine.engine.engine import FsdpEngine
from fsdp_engine.workload.models import build_model
from fsdp_engine.world.accelerator.device import install
from fsdp_engine.world.device import prepare
from oracles.sharding import unit_layouts
from tests.bench.table import Line
from tests.bench.work import Effort
from tests.small_cases import small_case

MODEL = Model(family="mlp", units=8, width=2048, hidden=1600)
WORLD_SIZE = 2
BYTES = 4 * sum(
    parameter.numel
    for unit in unit_layouts(small_case(shape=(1,), model=MODEL))
    for parameter in unit.parameters
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What one export took on one rank: copies and their bytes in and out, peak, seconds."""

    copies_in: int
    copies_out: int
    bytes_in: int
    bytes_out: int
    peak: int
    seconds: float


def measure(effort: Effort) -> list[Line]:
    """Every strategy, staged and not; the best of the rounds' seconds."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", __spec__.name, folder, str(effort.rounds)]
        ranks = [
            subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True)
            for rank in range(WORLD_SIZE)
        ]
        told = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        return [Line(part="export", name="exports", value=None, unit="", note="no device")]
    found: dict[str, dict[str, Any]] = json.loads(told[0].splitlines()[-1])
    return [line for name, one in found.items() for line in _lines(name, Counted(**one))]


def _lines(name: str, found: Counted) -> Iterator[Line]:
    note = f"{found.copies_in} copies in, {found.copies_out} out"
    moved = (found.bytes_in + found.bytes_out) / 1e6
    yield Line(part="export", name=f"{name}: copied", value=moved, unit="MB", note=note)
    shares = f"{found.peak / (BYTES / WORLD_SIZE):.2f} times a rank's parameters"
    yield Line(
        part="export", name=f"{name}: at most", value=found.peak / 1e6, unit="MB", note=shares
    )
    yield Line(part="export", name=f"{name}: time", value=found.seconds, unit="s")


def _count(engine: FsdpEngine, action: Export, rounds: int) -> Counted:
    device = install()
    best = float("inf")
    before = device.memory_allocated
    for _ in range(min(rounds, 5)):
        device.ledger.take()
        device.reset_peak()
        dist.barrier()
        began = time.perf_counter()
        for _name, _tensor in engine.export(action):
            pass
        best = min(best, time.perf_counter() - began)
    copies = device.ledger.take()
    counts = Counter(copy.direction for copy in copies)
    sizes: Counter[str] = Counter()
    for copy in copies:
        sizes[copy.direction] += copy.num_bytes
    return Counted(
        copies_in=counts["host_to_device"],
        copies_out=counts["device_to_host"],
        bytes_in=sizes["host_to_device"],
        bytes_out=sizes["device_to_host"],
        peak=device.max_memory_allocated - before,
        seconds=best,
    )


def _serve(folder: str, rounds: int, rank: int) -> None:
    torch.set_num_threads(1)
    device = prepare("sim")
    store = dist.FileStore(str(Path(folder, "store")), WORLD_SIZE)
    dist.init_process_group(
        device.backend(WORLD_SIZE), store=store, rank=rank, world_size=WORLD_SIZE
    )
    found: dict[str, dict[str, Any]] = {}
    for strategy in get_args(Strategy):
        case = small_case(shape=(WORLD_SIZE,), model=MODEL, strategy=strategy)
        engine = _engine(case, torch.device(device.torch_name(rank)))
        for staging in ("skip", "force"):
            counted = _count(engine, Export(staging=staging), rounds)
            name = f"{strategy} {'staged' if staging == 'force' else 'unstaged'}"
            found[name] = {field: getattr(counted, field) for field in Counted.__slots__}
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    dist.destroy_process_group()


def _engine(case: Case, device: torch.device) -> FsdpEngine:
    config = EngineConfig(
        strategy="fsdp" if case.engine.strategy == "fsdp1" else "fsdp2", param_offload=True
    )
    return FsdpEngine(build_model(case), config, OptimizerConfig(), device=device)


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))

"""Sessions over the ranks of a torchrun job: two agents on the loopback stand for two machines."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsdp_engine.contract.case import Case, Mesh
from fsdp_engine.contract.case_file import case_id
from fsdp_engine.contract.codec import encode
from fsdp_engine.world.pool import WorldPool
from properties.checks.gradients import match_oracle
from properties.repro import PROJECT
from properties.strategies.tables import one_case

(CASE,) = one_case()
CASES = (CASE, Case(batches=CASE.batches, mesh=Mesh(shape=(1, 2))))
ENGINE = "torch_fsdp2"
ENDS_S = 120.0
"""Far more than it takes: a session that is still there then hangs."""


@contextmanager
def job(folder: Path, *arguments: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Two agents of one rank each that run the session; none of them outlives it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    agents = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2"),
                *(f"--node-rank={node}", "--nproc-per-node=1", "--master-addr=127.0.0.1"),
                *(f"--master-port={port}", "-m", "properties.serve", "-c"),
                *(str(PROJECT / "pyproject.toml"), f"--rootdir={PROJECT}"),
                *(str(PROJECT / "properties/test_gradients.py"), "-p", "no:cacheprovider"),
                *("-v", "--engine", ENGINE, "--report-json", str(folder / "report.json")),
                *arguments,
            ],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(PROJECT), "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for node in range(2)
    ]
    try:
        yield agents
    finally:
        for agent in agents:
            agent.kill()
            agent.communicate()


def _gradients(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return next(p for p in report["properties"] if p["id"] == "gradient-matches-oracle")


def test_a_job_says_of_a_case_what_the_local_pool_says(tmp_path: Path) -> None:
    given = tmp_path / "cases.json"
    given.write_text(json.dumps([encode(case) for case in CASES]))
    with job(tmp_path, "--cases", str(given), "-k", "match_oracle and not steps") as agents:
        printed, _ = agents[0].communicate(timeout=ENDS_S)
        assert agents[1].wait(ENDS_S) == 0
    assert agents[0].returncode == 0, printed
    assert "job: 2 ranks by torchrun" in printed
    with WorldPool(ENGINE) as pool:
        local = [match_oracle(case, pool) for case in CASES]
    shown = _gradients(tmp_path)
    assert shown["case_ids"] == sorted(map(case_id, CASES))
    assert {shown["verdict"]} == {verdict.outcome for verdict in local}
    assert shown["worst_margin"] == max(verdict.margin or 0.0 for verdict in local)


def test_a_lost_machine_ends_the_session_with_its_report(tmp_path: Path) -> None:
    with job(tmp_path, "--profile", "smoke", "--hypothesis-seed", "5") as agents:
        first, other = agents
        assert first.stdout is not None
        printed = ""
        for line in first.stdout:
            printed += line
            if "PASSED" in line:
                break
        os.kill(other.pid, signal.SIGKILL)
        late = threading.Timer(ENDS_S, first.kill)
        late.start()
        printed += first.stdout.read()
        late.cancel()
        assert first.wait() == 1, printed
    assert "rank 1 of the job" in printed
    assert "is gone: the session ends" in printed
    assert "properties of torch_fsdp2" in printed
    assert _gradients(tmp_path)["judged"] >= 1

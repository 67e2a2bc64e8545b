"""Ranks on GPUs, as far as a machine without one can tell: who touches CUDA, and what is told."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from fsdp_engine.adapters.numerics import fsdp1_numerics, fsdp2_numerics
from fsdp_engine.contract.case import Case
from fsdp_engine.contract.errors import AcceleratorError
from fsdp_engine.contract.model import Model
from fsdp_engine.contract.observation import Level
from fsdp_engine.world import device, processes
from fsdp_engine.world.device import Cuda, check_asleep
from fsdp_engine.world.environment import environment
from fsdp_engine.world.pool import WorldPool
from oracles.evaluation import Evaluator
from oracles.exactness import exact_elements
from oracles.reduction import emulate
from oracles.replay import replay, replay_float64
from oracles.rounding import allowance, gamma
from properties import plugin, serve
from properties import replay as replay_command
from properties.repro import write_repro
from properties.strategies.tables import one_case
from tests.small_cases import exact_case, small_case

TOLD = "sees no GPU on this machine; legal here are cpu and sim"


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    monkeypatch.setattr(device, "num_gpus", lambda: 2)
    return Cuda()


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "num_gpus", lambda: 0)
    monkeypatch.setattr(processes, "start", _no_start)


def _no_start(*_: object) -> NoReturn:
    raise AssertionError("a world is started")


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_no_world_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line that names what is legal: in a suite, a replay and a torchrun job."""
    with pytest.raises(AcceleratorError, match=TOLD):
        WorldPool("reference", device="cuda")
    path = write_repro(tmp_path, one_case()[0], property_id="replicas-agree", engine="reference")
    assert replay_command.main([str(path), "--engine", "reference", "--device", "cuda"]) == 2
    assert TOLD in capsys.readouterr().out
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("MASTER_PORT", "1")
        assert serve.main(["properties/", "--device", "cuda"]) == pytest.ExitCode.USAGE_ERROR
        assert TOLD in capsys.readouterr().err
    suite = ["properties/test_planner.py", "--device", "cuda", "-n", "0", "-p", "no:cacheprovider"]
    assert pytest.main(suite) == pytest.ExitCode.USAGE_ERROR
    told = capsys.readouterr()
    assert f"--device cuda: torch {torch.__version__} {TOLD}" in told.out + told.err


def test_ranks_take_gpus_in_turn_and_share_them_over_gloo(
    two_gpus: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [two_gpus.torch_name(rank) for rank in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert two_gpus.backend(2) == "cpu:gloo,cuda:nccl"
    assert two_gpus.backend(3) == "cpu:gloo,cuda:gloo"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # of a job on several such machines
    assert two_gpus.backend(4) == "cpu:gloo,cuda:nccl"


def test_a_gpu_is_shared_by_a_few_workers(
    monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    monkeypatch.setattr(plugin, "num_gpus", lambda: 1)
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    for name, workers in (("cpu", 16), ("sim", 16), ("cuda", plugin.WORKERS_PER_GPU)):
        monkeypatch.setattr(pytestconfig.option, "device", name)
        assert plugin.pytest_xdist_auto_num_workers(pytestconfig) == workers


def test_a_rank_that_cannot_have_its_gpu_says_which(
    two_gpus: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(_: str) -> NoReturn:
        raise RuntimeError("CUDA-capable device(s) is/are busy")

    monkeypatch.setattr(torch.cuda, "set_device", busy)
    with pytest.raises(AcceleratorError, match="rank 3 cannot use cuda:1: CUDA-capable"):
        two_gpus.enter(3)


def _case(ranks: int, policy: str = "fp32/bf16/bf16") -> Case:
    return small_case(shape=(ranks,), model=Model(family="mlp", width=4), policy=policy)


def test_nccl_averages_by_multiplying_first(two_gpus: Cuda) -> None:
    """Its average has a rounded inverse; what FSDP1 divides by itself stays as it is."""
    case = _case(2)
    declared = two_gpus.numerics(fsdp2_numerics(case), 2)
    assert declared.levels == (Level(axis="shard", size=2, before=2.0, fused=True),)
    assert declared.device == "cuda:0"
    own = two_gpus.numerics(fsdp1_numerics(case), 2)
    assert own.levels == (replace(fsdp1_numerics(case).levels[0], fused=True),)
    shared = two_gpus.numerics(fsdp2_numerics(_case(3)), 3)
    assert shared == replace(fsdp2_numerics(_case(3)), device="cuda:0")


@pytest.mark.parametrize(("ranks", "more"), [(2, 0), (3, 1), (4, 0)])
def test_a_rounded_inverse_is_one_rounding_more(ranks: int, more: int) -> None:
    """And one more sum whose order and precision are not known."""
    case = _case(ranks)
    gloo = fsdp2_numerics(case)
    nccl = replace(gloo, levels=tuple(map(device._by_nccl, gloo.levels)))
    u = 2.0**-8
    n = ranks - 1 + (ranks == 3)
    assert allowance(gloo, 1).relative == pytest.approx(_bound(n, u), rel=1e-12)
    assert allowance(nccl, 1).relative == pytest.approx(_bound(n + more, u), rel=1e-12)
    evaluator = Evaluator(case)
    plans = [[[0], [1]] for _ in range(ranks)]
    local = replay(evaluator, 0, plans, gloo, evaluator.weights)
    name = next(iter(evaluator.shapes))
    assert emulate(local, name, gloo, case.mesh)
    assert emulate(local, name, nccl, case.mesh) is None


def _bound(n: int, u: float) -> float:
    return math.expm1(math.log1p(gamma(n, u)))


@pytest.mark.parametrize(("ranks", "exact"), [(2, True), (3, False)])
def test_an_inverse_that_is_rounded_certifies_nothing(ranks: int, *, exact: bool) -> None:
    case = exact_case(shape=(ranks,), model=Model(family="mlp", width=3))
    gloo = fsdp2_numerics(case)
    nccl = replace(gloo, levels=tuple(map(device._by_nccl, gloo.levels)))
    evaluator = Evaluator(case)
    plans = [[[0]] for _ in range(ranks)]
    local, wide = (
        one(evaluator, 0, plans, gloo, evaluator.weights) for one in (replay, replay_float64)
    )
    for declared, wanted in ((gloo, True), (nccl, exact)):
        masks = [
            exact_elements(name, shape, narrow=local, wide=wide, numerics=declared, mesh=case.mesh)
            for name, shape in evaluator.shapes.items()
        ]
        assert any(mask.any() for mask in masks) == wanted


@pytest.mark.parametrize(("name", "visible"), [("cpu", ""), ("sim", ""), ("cuda", "0,1")])
def test_ranks_see_gpus_only_where_they_compute_on_them(
    monkeypatch: pytest.MonkeyPatch, name: str, visible: str
) -> None:
    """The simulated device would hide a real one, and an engine on the host might prefer it."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert environment(name)["CUDA_VISIBLE_DEVICES"] == visible


def test_a_process_that_has_woken_cuda_forks_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    check_asleep()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(AcceleratorError, match="no rank could"):
        check_asleep()


def test_nothing_wakes_cuda_before_ranks_are_forked() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.asleep"],
        capture_output=True,
        text=True,
        check=False,
        env=environment("cuda"),
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found == {
        "woken": [],
        "initialized": False,
        "believes": [True, 2],
        "deterministic": [True, True],
        "tf32": [False, False],
        "reduced": [False, False],
        "workspace": ":4096:8",
    }

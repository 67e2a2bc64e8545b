"""The simulated device, in a process of its own: one that has installed it keeps it."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fsdp_engine.contract.errors import AcceleratorError
from fsdp_engine.world.accelerator import build
from fsdp_engine.world.accelerator.device import install
from fsdp_engine.world.device import ENVIRONMENTS
from tests.accelerator_checks import CHECKS

NO_COMPILER = "needs a C++ compiler"


@functools.cache
def _outcomes() -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.accelerator_checks"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | ENVIRONMENTS["sim"] | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    outcomes: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return outcomes


@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_device(name: str) -> None:
    outcomes = _outcomes()
    if NO_COMPILER in outcomes.get("refused", ""):
        pytest.skip(outcomes["refused"])
    assert outcomes[name] == ""


def test_a_missing_compiler_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(AcceleratorError, match=re.escape(NO_COMPILER)) as raised:
        build.load()
    assert "\n" not in str(raised.value)


@pytest.fixture
def broken_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A source that does not compile, and nothing built before."""
    source = tmp_path / "device.cpp"
    source.write_text("this is no C++\n")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "SOURCE", source)


@pytest.mark.usefixtures("broken_source")
def test_a_source_that_does_not_compile_is_told_with_the_compiler_s_words() -> None:
    with pytest.raises(AcceleratorError, match=r"could not be built:\n.*device\.cpp:1"):
        build.load()
    assert not build.library_path().exists()


@pytest.mark.usefixtures("broken_source")
def test_a_torch_that_was_not_tested_is_named_where_the_source_does_not_compile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    told = r"could not be built for torch 2\.99\.0 \(it is tested with 2\.13"
    with pytest.raises(AcceleratorError, match=told):
        build.load()


def test_a_torch_that_is_built_for_another_device_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(AcceleratorError, match=r"is built for cuda .* build for the CPU alone"):
        install()


def test_the_library_is_kept_by_torch_and_source(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = tmp_path / "device.cpp"
    source.write_text("one\n")
    monkeypatch.setattr(build, "SOURCE", source)
    first = build.library_path()
    source.write_text("two\n")
    assert build.library_path() != first


def test_a_process_that_asked_for_its_accelerator_is_refused() -> None:
    code = (
        "import torch; torch.accelerator.is_available()\n"
        "from fsdp_engine.world.accelerator.device import install\n"
        "install()\n"
    )
    environment = os.environ | ENVIRONMENTS["sim"]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 1
    if NO_COMPILER in done.stderr:
        pytest.skip("no compiler")
    assert "install it first" in done.stderr

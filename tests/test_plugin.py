"""Whole sessions in processes of their own: options, exit codes, messages, reports."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from fsdp_engine.contract.case import DTYPE_POLICIES, Case, Mesh
from fsdp_engine.contract.case_file import canonical_json, case_id
from fsdp_engine.contract.codec import encode
from oracles.verdict import NOT_REPLAYABLE
from properties.repro import PROJECT
from properties.strategies.tables import one_case
from tests.engines import unreplayable

(CASE,) = one_case()
COLUMN = Case(batches=CASE.batches, mesh=Mesh(shape=(2, 1)))
BFLOAT16 = Case(batches=CASE.batches, dtypes=DTYPE_POLICIES["fp32/bf16/fp32"])
GOOD = "torch_fsdp2"
WRONG = "tests.engines.for_judging:DoublesGradients"
REFUSING = "tests.engines.for_judging:RefusesAll"


OPTIONS = (
    *("-p", "no:cacheprovider", "-c", str(PROJECT / "pyproject.toml"), f"--rootdir={PROJECT}"),
    str(PROJECT / "properties" / "test_gradients.py"),
)

Inside: TypeAlias = "Callable[..., tuple[int, str]]"


def _session(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", *OPTIONS, *arguments]
    environment = os.environ | {"PYTHONPATH": str(PROJECT)}  # for `-p`, which comes first
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture
def inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Inside:
    """A session in this process, without the seconds that a new one takes to start."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str]:
        code = pytest.main([*OPTIONS, "-n", "0", *arguments])
        printed = capsys.readouterr()
        return int(code), printed.out + printed.err

    return run


def _cases(folder: Path, *cases: Case) -> str:
    path = folder / "cases.json"
    path.write_text(json.dumps([encode(case) for case in cases]))
    return str(path)


def _report(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "out" / "report.json").read_text())
    return report


@pytest.mark.parametrize("confirmed", [True, False], ids=["alone", "two workers, other kernels"])
def test_given_cases_are_judged_by_all_that_applies(tmp_path: Path, *, confirmed: bool) -> None:
    """Also by workers, which learn from their controller what its probe did not confirm."""
    cases = _cases(tmp_path, CASE, COLUMN, BFLOAT16)
    probed = ("-n", "0") if confirmed else ("-n", "2", "-p", unreplayable.HERE)
    ran = _session(
        tmp_path,
        *("--engine", GOOD, "--cases", cases, *probed),
        *("--report-json", str(tmp_path / "out" / "report.json"), "--hypothesis-seed", "5"),
        *("--minutes", "60"),
    )
    assert ran.returncode == 0, ran.stdout
    counted = re.search(r"60 minutes: (\d+) of (\d+) tests were run", ran.stdout)
    assert counted is not None
    assert 0 < int(counted[1]) == int(counted[2])
    assert f"engine: {GOOD} on cpu" in ran.stdout
    assert "profile: default, seed: 5" in ran.stdout
    assert ("probe: replayed gradients are bit-equal on this machine" in ran.stdout) == confirmed
    told = "probe: replay is not bit-equal in bfloat16, nothing is judged by it there (gradient "
    assert ran.stdout.count(told) == (0 if confirmed else 2)  # in the header and below the table
    report = _report(tmp_path)
    assert (report["schema"], report["engine"], report["seed"]) == (1, GOOD, 5)
    assert report["wall_seconds"] > 0
    assert list(report["unreplayable"]) == ([] if confirmed else ["bfloat16"])
    by_id = {entry["id"]: entry for entry in report["properties"]}
    gradients = by_id["gradient-matches-oracle"]
    judged = [CASE, COLUMN, BFLOAT16] if confirmed else [CASE, COLUMN]
    assert (gradients["drawn"], gradients["verdict"]) == (3, "pass")
    assert gradients["not_applicable"] == ({} if confirmed else {NOT_REPLAYABLE: 1})
    assert gradients["cases_per_world_size"] == {"2": len(judged)}
    assert gradients["case_ids"] == sorted(map(case_id, judged))
    assert by_id["replicas-agree"]["judged"] == 1
    assert by_id["gradient-is-exact"]["verdict"] == "not_applicable"
    assert report["pairs_judged"] == (42 if confirmed else 35)


def test_a_budget_in_which_nothing_begins_says_so_and_fails(inside: Inside, tmp_path: Path) -> None:
    report = ("--report-json", "r.json", "--nights", "n.jsonl")
    code, printed = inside("--engine", GOOD, "--minutes", "0.001", *report)
    assert code == pytest.ExitCode.NO_TESTS_COLLECTED
    assert re.search(r"0\.001 minutes: 0 of [1-9]\d* tests were run", printed)
    assert not (tmp_path / "n.jsonl").exists()


def test_a_failure_is_shrunk_written_and_ends_with_the_command(tmp_path: Path) -> None:
    ran = _session(
        tmp_path,
        *("--engine", WRONG, "-n", "0", "-k", "match_oracle and fsdp2 and line2 and not steps"),
        *("--report-json", str(tmp_path / "out" / "report.json"), "-x"),
    )
    assert ran.returncode == 1, ran.stdout
    assert "GradientMatchesOracleFailed: gradient-matches-oracle: fail" in ran.stdout
    commands = re.findall(r"python (-m properties.replay (\S+) --engine \S+)", ran.stdout)
    assert commands
    arguments, path = commands[-1]
    assert (tmp_path / path).with_suffix(".py").exists()
    again = subprocess.run(
        [sys.executable, *arguments.split()],
        cwd=tmp_path,
        env={"PYTHONPATH": str(PROJECT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (again.returncode, again.stdout[:6]) == (1, "FAILED"), again.stderr
    (entry,) = _report(tmp_path)["properties"]
    assert entry["verdict"] == "fail"
    assert "Falsifying" not in ran.stdout
    assert "@reproduce_failure" in ran.stdout


def test_an_engine_that_refuses_everything_is_no_pass(tmp_path: Path, inside: Inside) -> None:
    code, printed = inside(
        *("--engine", REFUSING, "--cases", _cases(tmp_path, CASE), "-k", "match_oracle"),
        *("--report-json", str(tmp_path / "out" / "report.json")),
    )
    assert code == 1, printed
    told = "property gradient-matches-oracle: every case was refused: not in the mood for 2 ranks"
    assert told in printed
    (entry,) = _report(tmp_path)["properties"]
    assert (entry["verdict"], entry["judged"]) == ("not_applicable", 0)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--engine", "no_such_engine"), "no_such_engine"),
        (("--engine", "tests.engines.broken_import:Engine"), "needs a library that is broken"),
        (("--profile", "huge"), "--profile: 'huge' is unknown"),
        (("--device", "moon"), "--device: 'moon' is unknown; legal are cpu, sim"),
        (("--hypothesis-seed", "x"), "'x'"),
        (("--cases", "missing.json"), "missing.json"),
        (("--report-json", "/proc/report.json"), "--report-json /proc/report.json"),
    ],
)
def test_a_bad_option_ends_the_session_at_once(
    inside: Inside, arguments: tuple[str, ...], told: str
) -> None:
    code, printed = inside(*arguments)
    assert code == 4, printed
    assert told in printed
    assert "INTERNALERROR" not in printed


def test_a_device_that_cannot_be_built_ends_the_session_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    ran = _session(tmp_path, "-n", "2", "--device", "sim", str(PROJECT / "properties"))
    assert ran.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--device sim: the simulated accelerator needs a C++ compiler" in ran.stdout + ran.stderr


def test_a_bad_case_is_a_failing_test_and_the_others_are_judged(
    tmp_path: Path, inside: Inside
) -> None:
    bad = tmp_path / "bad.json"
    wrong = canonical_json(CASE).replace('"fsdp2"', '"fsdp3"')
    bad.write_text(f"[{wrong}, {canonical_json(CASE)}]")
    report = tmp_path / "out" / "report.json"
    code, printed = inside(
        *("--engine", GOOD, "--cases", str(bad), "-k", "match_oracle or broken"),
        *("--report-json", str(report)),
    )
    assert code == 1, printed
    assert "bad.json, case 0: case.engine.strategy: 'fsdp3'" in printed
    assert "1 failed, 1 passed" in printed
    (entry,) = _report(tmp_path)["properties"]
    assert (entry["verdict"], entry["judged"]) == ("pass", 1)

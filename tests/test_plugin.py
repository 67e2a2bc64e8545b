"""Whole sessions in processes of their own: options, exit codes, messages, reports."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdp_engine.contract.case import Case, Mesh
from fsdp_engine.contract.case_file import canonical_json, case_id
from fsdp_engine.contract.codec import encode
from properties.repro import PROJECT
from properties.strategies.tables import one_case

(CASE,) = one_case()
COLUMN = Case(batches=CASE.batches, mesh=Mesh(shape=(2, 1)))
GOOD = "torch_fsdp2"
WRONG = "tests.engines.for_judging:DoublesGradients"
REFUSING = "tests.engines.for_judging:RefusesAll"


def _session(
    folder: Path, *arguments: str, suite: str = "test_gradients.py"
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c"]
    command += [str(PROJECT / "pyproject.toml"), f"--rootdir={PROJECT}"]
    command += [str(PROJECT / "properties" / suite), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def _cases(folder: Path, *cases: Case) -> str:
    path = folder / "cases.json"
    path.write_text(json.dumps([encode(case) for case in cases]))
    return str(path)


def _report(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "out" / "report.json").read_text())
    return report


@pytest.mark.parametrize("workers", ["0", "2"])
def test_given_cases_are_judged_by_all_that_applies(tmp_path: Path, workers: str) -> None:
    ran = _session(
        tmp_path,
        *("--engine", GOOD, "--cases", _cases(tmp_path, CASE, COLUMN), "-n", workers),
        *("--report-json", str(tmp_path / "out" / "report.json"), "--hypothesis-seed", "5"),
    )
    assert ran.returncode == 0, ran.stdout
    assert f"engine: {GOOD} on cpu" in ran.stdout
    assert "profile: default, seed: 5" in ran.stdout
    report = _report(tmp_path)
    assert (report["schema"], report["engine"], report["seed"]) == (1, GOOD, 5)
    assert report["wall_seconds"] > 0
    by_id = {entry["id"]: entry for entry in report["properties"]}
    gradients = by_id["gradient-matches-oracle"]
    assert (gradients["drawn"], gradients["judged"], gradients["verdict"]) == (2, 2, "pass")
    assert gradients["cases_per_world_size"] == {"2": 2}
    assert gradients["case_ids"] == sorted([case_id(CASE), case_id(COLUMN)])
    assert by_id["replicas-agree"]["judged"] == 1
    assert by_id["gradient-is-exact"]["verdict"] == "not_applicable"
    assert report["pairs_judged"] == 35


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


def test_an_engine_that_refuses_everything_is_no_pass(tmp_path: Path) -> None:
    ran = _session(
        tmp_path,
        *("--engine", REFUSING, "--cases", _cases(tmp_path, CASE), "-k", "match_oracle"),
        *("--report-json", str(tmp_path / "out" / "report.json")),
    )
    assert ran.returncode == 1, ran.stdout
    told = "property gradient-matches-oracle: every case was refused: not in the mood for 2 ranks"
    assert told in ran.stdout
    (entry,) = _report(tmp_path)["properties"]
    assert (entry["verdict"], entry["judged"]) == ("not_applicable", 0)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--engine", "no_such_engine"), "no_such_engine"),
        (("--engine", "tests.engines.broken_import:Engine"), "needs a library that is broken"),
        (("--profile", "huge"), "--profile: 'huge' is unknown"),
        (("--hypothesis-seed", "x"), "'x'"),
        (("--cases", "missing.json"), "missing.json"),
        (("--report-json", "/proc/report.json"), "--report-json /proc/report.json"),
    ],
)
def test_a_bad_option_ends_the_session_at_once(
    tmp_path: Path, arguments: tuple[str, ...], told: str
) -> None:
    ran = _session(tmp_path, *arguments)
    assert ran.returncode == 4, ran.stdout + ran.stderr
    assert told in ran.stdout + ran.stderr
    assert "INTERNALERROR" not in ran.stdout + ran.stderr


def test_a_bad_case_is_a_failing_test_and_the_others_are_judged(tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    wrong = canonical_json(CASE).replace('"fsdp2"', '"fsdp3"')
    bad.write_text(f"[{wrong}, {canonical_json(CASE)}]")
    report = tmp_path / "out" / "report.json"
    ran = _session(
        tmp_path,
        *("--engine", GOOD, "--cases", str(bad), "-k", "match_oracle or broken"),
        *("--report-json", str(report)),
    )
    assert ran.returncode == 1
    assert "bad.json, case 0: case.engine.strategy: 'fsdp3'" in ran.stdout
    assert "1 failed, 1 passed" in ran.stdout
    (entry,) = _report(tmp_path)["properties"]
    assert (entry["verdict"], entry["judged"]) == ("pass", 1)

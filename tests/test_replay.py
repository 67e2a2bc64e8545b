"""Replay and repro scripts: FIXED, FAILED or ERROR, with the exit code to match."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_engine.contract.case_file import case_from_json
from properties import replay
from properties.repro import case_file_text, write_repro
from properties.strategies.tables import one_case

(CASE,) = one_case()
GOOD = "torch_fsdp2"
WRONG = "tests.engines.for_judging:DoublesGradients"
PROPERTY = "gradient-matches-oracle"


def _file(folder: Path, name: str = "case.json", property_id: str = PROPERTY) -> Path:
    path = folder / name
    path.write_text(case_file_text(CASE, property_id))
    return path


def _replay(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, list[str]]:
    code = replay.main([str(argument) for argument in arguments])
    return code, capsys.readouterr().out.splitlines()


def test_fixed_and_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _file(tmp_path)
    code, lines = _replay(capsys, path, "--engine", GOOD)
    assert (code, len(lines)) == (0, 1)
    assert lines[0].startswith(f"FIXED {path}: ")
    code, lines = _replay(capsys, path, "--engine", WRONG)
    assert (code, len(lines)) == (1, 1)
    assert lines[0].startswith(f"FAILED {path}: ")
    assert "should be" in lines[0]


def test_bad_files_are_errors_and_the_rest_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _file(tmp_path, "a.json")
    (tmp_path / "b.json").write_text('{"schema": 1, "property": "x", "case": {"batches": 3}}')
    (tmp_path / "c.json").write_bytes(b"\xff\xfe")
    (tmp_path / "d.json").write_text(case_file_text(CASE, "no-such-property"))
    (tmp_path / "e.json").write_text(case_file_text(CASE, ""))
    missing = tmp_path / "missing.json"
    empty = tmp_path / "empty"
    empty.mkdir()
    code, lines = _replay(capsys, tmp_path, missing, empty, "--engine", GOOD)
    assert code == 2
    assert [line.split()[0] for line in lines] == ["FIXED", *["ERROR"] * 6]
    for line, named in zip(
        lines[1:],
        ("case.batches", "c.json", "no-such-property", "property", "missing.json", "empty"),
        strict=True,
    ):
        assert named in line


def test_what_is_fixed_is_pruned_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only what was judged and passed goes, its script with it."""
    fixed = write_repro(tmp_path, CASE, property_id=PROPERTY, engine=WRONG)
    exact = _file(tmp_path, "exact.json", "gradient-is-exact")
    _replay(capsys, tmp_path, "--engine", GOOD)
    assert fixed.exists()
    code, lines = _replay(capsys, tmp_path, "--engine", WRONG, "--prune")
    assert code == 2
    assert sorted(line.split()[0] for line in lines) == ["ERROR", "FAILED"]
    assert fixed.exists()
    code, lines = _replay(capsys, tmp_path, "--engine", GOOD, "--prune")
    assert code == 2
    assert [line for line in lines if line.startswith("FIXED")] == [
        f"FIXED {fixed}: the property holds; removed"
    ]
    assert list(tmp_path.iterdir()) == [exact]


@pytest.mark.parametrize(
    ("engine", "named"),
    [
        ("no_such_engine", "no_such_engine"),
        ("tests.engines.broken_import:Engine", "needs a library that is broken"),
        ("tests.engines.for_judging:Nothing", "Nothing"),
    ],
)
def test_a_bad_engine_is_one_error_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], engine: str, named: str
) -> None:
    code, lines = _replay(capsys, _file(tmp_path), "--engine", engine)
    assert (code, len(lines)) == (2, 1)
    assert lines[0].startswith("ERROR")
    assert named in lines[0]


def test_what_was_not_judged_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refusing = "tests.engines.for_judging:RefusesAll"
    code, lines = _replay(capsys, _file(tmp_path), "--engine", refusing)
    assert (code, lines[0].split()[0]) == (2, "ERROR")
    assert "not in the mood for 2 ranks" in lines[0]
    exact = _file(tmp_path, "exact.json", "gradient-is-exact")
    code, lines = _replay(capsys, exact, "--engine", GOOD)
    assert (code, lines[0].split()[0]) == (2, "ERROR")
    assert "not applicable" in lines[0]


def test_the_property_can_be_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _file(tmp_path, property_id="")
    code, _ = _replay(capsys, path, "--engine", GOOD, "--property", "every-unit-is-reduced")
    assert code == 0


@pytest.mark.parametrize(
    ("engine", "code", "status"),
    [(GOOD, 0, "FIXED"), (WRONG, 1, "FAILED"), ("no_such_engine", 2, "ERROR")],
)
def test_a_repro_script_runs_alone_from_anywhere(
    tmp_path: Path, engine: str, code: int, status: str
) -> None:
    path = write_repro(tmp_path / "repro", CASE, property_id=PROPERTY, engine=engine)
    script = path.with_suffix(".py")
    text = script.read_text()
    assert len(text.splitlines()) < 80
    assert case_from_json(text.split('"""')[3]) == CASE
    ran = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin"},
    )
    assert ran.returncode == code, ran.stderr
    assert ran.stdout.startswith(status)
    assert len(ran.stdout.splitlines()) == 1


def test_a_case_file_names_no_code_to_import(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _file(tmp_path, property_id="tests.engines.broken_import:check")
    code, lines = _replay(capsys, path, "--engine", GOOD)
    assert (code, len(lines)) == (2, 1)
    assert "tests.engines.broken_import" in lines[0]
    assert "is unknown" in lines[0]
    assert "tests.engines.broken_import" not in sys.modules


def test_a_check_that_raises_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _file(tmp_path)
    check = "tests.engines.for_judging:raising_check"
    code, lines = _replay(capsys, path, "--engine", GOOD, "--property", check)
    assert (code, len(lines)) == (2, 1)
    assert "the check raised KeyError" in lines[0]

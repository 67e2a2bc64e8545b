"""Scripts of findings stand alone: short, without this project, told in their engine's file."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from properties.repro import PROJECT

FOLDER = PROJECT / "docs" / "findings"
SCRIPTS = sorted(FOLDER.glob("*.py"))
OWN = {"fsdp_engine", "oracles", "properties", "tests", "hypothesis", "pytest"}


def _imported(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").partition(".")[0])
    return names


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_needs_nothing_of_this_project(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    assert len(source.splitlines()) <= 80
    assert not _imported(tree) & OWN
    told = ast.get_docstring(tree) or ""
    assert "control" in told.lower()
    engine = path.stem.partition("_")[0]
    assert path.name in (FOLDER / f"{engine}.md").read_text(encoding="utf-8")


def test_there_are_findings() -> None:
    assert SCRIPTS

"""What the two sides of a world agree on besides messages: files and the life socket's bytes."""

from __future__ import annotations

from pathlib import Path

REPORT = b"?"
"""Asks a rank's watcher to note in the log whether the last collective has finished."""

REPORTED = b"!"


def files_path(store: str | Path) -> Path:
    """Where the trainees of a case leave files, by the path of its store."""
    return Path(f"{store}.files")


def stack_path(directory: Path, rank: int) -> Path:
    """Where a rank writes its Python stacks when it gets SIGUSR1."""
    return directory / f"rank{rank}.stack"


def log_path(directory: Path, rank: int) -> Path:
    """Where a rank writes one line per collective."""
    return directory / f"rank{rank}.log"


def output_path(directory: Path, rank: int) -> Path:
    """Where a rank's standard output and error go."""
    return directory / f"rank{rank}.out"

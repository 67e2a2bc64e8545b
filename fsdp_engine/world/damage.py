"""Checkpoints that something has happened to, whatever an engine's files look like."""

from __future__ import annotations

import shutil
from pathlib import Path

from fsdp_engine.contract.actions import Reject


def damaged_path(folder: Path) -> Path:
    """Where the damaged copy of a folder of checkpoints lies."""
    return folder.with_name("damaged")


def damaged_copy(folder: Path, action: Reject) -> None:
    """Copy a folder of checkpoints and damage the newest: the files that were written last."""
    copy = damaged_path(folder)
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy)
    written = sorted(path for path in copy.rglob("*") if path.is_file() and path.stat().st_size)
    newest = max(written, key=lambda path: path.stat().st_mtime_ns).parent
    files = [path for path in written if path.parent == newest]
    damaged = files[action.file % len(files)]
    content = damaged.read_bytes()
    match action.damage:
        case "truncated":
            damaged.write_bytes(content[: len(content) // 2])
        case "flipped":
            middle = len(content) // 2
            flipped = bytes([content[middle] ^ 1])
            damaged.write_bytes(content[:middle] + flipped + content[middle + 1 :])
        case "missing":
            damaged.unlink()
        case "foreign":
            for path in files:
                path.write_bytes(b"{}")

"""The files of checkpoints: whole or not there, and a byte that has changed is found.

A root folder holds checkpoints by number, the newest has the largest:

    root/00000007/checkpoint.json     what there is, with the sizes and SHA-256 of the other files
    root/00000007/*.safetensors       the tensors, one file a rank

A checkpoint is written in a hidden folder beside its place, its manifest last, and renamed once
everything is on disk: a crash leaves a hidden folder, which the next save removes, and never a
numbered one that is not whole. Older ones are renamed before they are removed, for the same reason.
One save at a time writes below a root. Nothing here talks to other ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fsdp_engine.contract.codec import decode, encode
from fsdp_engine.contract.errors import CaseError, CheckpointError

MANIFEST = "checkpoint.json"
_NUMBER = re.compile(r"\d{8}")
_WRITING, _REMOVING = ".writing-", ".removing-"
_LEGAL = f"legal is a folder with a {MANIFEST}, or one that holds such folders, as save writes them"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """A full tensor."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FileInfo:
    """A file's size in bytes and SHA-256 in hexadecimal."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleInfo:
    """Steps of the learning rate so far, and per parameter group the peak rate and the present one.

    Both as the scheduler and the optimizer hold them.
    """

    steps: int
    base_lrs: tuple[float, ...]
    lrs: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint is: `optimizer` is its name, empty where there is none.

    `tensors` are those that the files hold, whole, by key.
    """

    format: Literal["fsdp-engine-checkpoint-1"] = "fsdp-engine-checkpoint-1"
    world_size: int
    optimizer: str
    schedule: ScheduleInfo | None
    tensors: dict[str, TensorInfo]
    files: dict[str, FileInfo]


def begin(root: Path) -> Path:
    """A new hidden folder for the next checkpoint; what earlier crashes left is removed."""
    root.mkdir(parents=True, exist_ok=True)
    for left in [*root.glob(f"{_WRITING}*"), *root.glob(f"{_REMOVING}*")]:
        shutil.rmtree(left)
    numbers = [int(path.name) for path in checkpoints(root)]
    folder = root / f"{_WRITING}{max(numbers, default=0) + 1:08}"
    folder.mkdir()
    return folder


def commit(folder: Path, manifest: Manifest) -> Path:
    """Write the manifest and give the checkpoint its place, all of it on disk."""
    path = folder / MANIFEST
    path.write_text(_text(manifest), encoding="utf-8")
    sync(path)
    sync(folder)
    place = folder.parent / folder.name.removeprefix(_WRITING)
    folder.rename(place)
    sync(folder.parent)
    return place


def retain(root: Path, max_to_keep: int) -> None:
    """Remove all but the newest checkpoints."""
    for path in checkpoints(root)[:-max_to_keep]:
        hidden = root / f"{_REMOVING}{path.name}"
        path.rename(hidden)
        shutil.rmtree(hidden)


def abandon(folder: Path) -> None:
    """Remove what a failed save has written."""
    shutil.rmtree(folder, ignore_errors=True)


def checkpoints(root: Path) -> list[Path]:
    """The checkpoints of a root folder, the oldest first."""
    return sorted(path for path in root.iterdir() if _NUMBER.fullmatch(path.name))


def find(path: Path) -> Path:
    """The checkpoint at `path`: itself, or the newest below it.

    Raises:
        CheckpointError: there is none.
    """
    if (path / MANIFEST).is_file():
        return path
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder; {_LEGAL}")
    found = checkpoints(path)
    if not found:
        raise CheckpointError(f"{path}: no checkpoint in it; {_LEGAL}")
    return found[-1]


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        CheckpointError: it is missing, damaged or none of this format.
    """
    path = folder / MANIFEST
    try:
        text = path.read_text(encoding="utf-8")
        manifest = decode(Manifest, json.loads(text)["content"], where=MANIFEST)
    except (OSError, ValueError, TypeError, KeyError, RecursionError, CaseError) as error:
        told = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{path}: not the manifest of a checkpoint ({told})") from error
    if text != _text(manifest):
        raise CheckpointError(f"{path}: damaged, its SHA-256 is not the one that it states")
    return manifest


def names(folder: Path) -> list[str]:
    """The checkpoint's files but for the manifest, sorted."""
    return sorted(path.name for path in folder.iterdir() if path.name != MANIFEST)


def require_files(folder: Path, manifest: Manifest) -> None:
    """Raise `CheckpointError` unless exactly the manifest's files are there, in their sizes."""
    found, wanted = names(folder), sorted(manifest.files)
    if found != wanted:
        missing = sorted(set(wanted) - set(found))
        foreign = sorted(set(found) - set(wanted))
        raise CheckpointError(f"{folder}: missing files {missing}, foreign files {foreign}")
    for name, info in manifest.files.items():
        size = (folder / name).stat().st_size
        if size != info.size:
            raise CheckpointError(f"{folder / name}: {size} bytes, written were {info.size}")


def require_digests(folder: Path, manifest: Manifest, files: Iterable[str]) -> None:
    """Raise `CheckpointError` where one of these files has not the bytes that were written."""
    for name in files:
        if describe(folder / name) != manifest.files[name]:
            raise CheckpointError(f"{folder / name}: damaged, its SHA-256 is not the one written")


def describe(path: Path) -> FileInfo:
    """Size and digest of a file as it is now."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return FileInfo(size=path.stat().st_size, sha256=digest)


def sync(path: Path) -> None:
    """Return when a file, or a folder's list of names, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _text(manifest: Manifest) -> str:
    content = json.dumps(encode(manifest), sort_keys=True, separators=(",", ":"), allow_nan=False)
    digest = hashlib.sha256(content.encode()).hexdigest()
    return f'{{"sha256":"{digest}","content":{content}}}\n'

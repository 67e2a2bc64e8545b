"""The keys of a checkpoint's tensors, and whether those of a manifest are the engine's.

model/<name>  buffer/<name>  optimizer/<slot>/<name>  random/<rank>/<device>
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fsdp_engine.contract.errors import CheckpointError
from fsdp_engine.engine.checkpoint_files import Manifest, TensorInfo

MODEL, BUFFER, OPTIMIZER, RANDOM = "model/", "buffer/", "optimizer/", "random/"

Infos = Mapping[str, TensorInfo]


def require_model(folder: Path, manifest: Manifest, wanted: Infos) -> None:
    """Raise `CheckpointError` unless parameters and buffers are exactly these."""
    found = {key: i for key, i in manifest.tensors.items() if key.startswith((MODEL, BUFFER))}
    _require_keys(f"{folder}: another model", found, wanted)
    _require_same(folder, found, wanted)


def require_optimization(
    folder: Path, manifest: Manifest, *, name: str, slots: tuple[str, ...], groups: int
) -> None:
    """Raise `CheckpointError` unless it was saved with this optimizer and so many groups.

    Any parameter may be without state, and those that have some have all slots.
    """
    if manifest.optimizer != name:
        raise CheckpointError(
            f"{folder}: optimizer {manifest.optimizer or 'none'}; legal is {name}, the engine's"
        )
    rates = manifest.schedule
    if rates is None or {len(rates.base_lrs), len(rates.lrs)} != {groups}:
        raise CheckpointError(f"{folder}: no schedule of {groups} parameter groups")
    found = {key: i for key, i in manifest.tensors.items() if key.startswith(OPTIMIZER)}
    wanted: dict[str, TensorInfo] = {}
    number = TensorInfo(shape=(), dtype="float32")
    for parameter in sorted({key.split("/", 2)[-1] for key in found}):
        info = manifest.tensors.get(MODEL + parameter)
        if info is None:
            raise CheckpointError(
                f"{folder}: optimizer state of {parameter}, which is no parameter"
            )
        for slot in slots:
            wanted[f"{OPTIMIZER}{slot}/{parameter}"] = number if slot == "step" else info
    _require_keys(f"{folder}: optimizer state", found, wanted)
    _require_same(folder, found, wanted)


def require_random(folder: Path, manifest: Manifest, wanted: Infos) -> None:
    """Raise `CheckpointError` where a random state is there and none of this generator."""
    found = {key: info for key, info in manifest.tensors.items() if key in wanted}
    _require_same(folder, found, {key: wanted[key] for key in found})


def _require_keys(told: str, found: Infos, wanted: Infos) -> None:
    if found.keys() != wanted.keys():
        missing, foreign = sorted(wanted.keys() - found), sorted(found.keys() - wanted)
        raise CheckpointError(
            f"{told}: it lacks {missing or 'nothing'}, and has beside what the engine has: "
            f"{foreign or 'nothing'}"
        )


def _require_same(folder: Path, found: Infos, wanted: Infos) -> None:
    for key, info in wanted.items():
        if found[key] != info:
            raise CheckpointError(
                f"{folder}: {key} is {found[key].dtype} {found[key].shape}; legal is "
                f"{info.dtype} {info.shape}, the engine's"
            )

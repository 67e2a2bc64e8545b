"""Checkpoints on real ranks: what is refused, what is kept, and every world from every other."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_engine.adapters.reference import configs
from fsdp_engine.contract.case import DTYPE_POLICIES, Case, Optimizer, Strategy
from fsdp_engine.contract.errors import CheckpointError, ConfigError
from fsdp_engine.contract.model import Model
from fsdp_engine.engine.checkpoint_files import MANIFEST
from fsdp_engine.engine.engine import FsdpEngine
from fsdp_engine.workload.models import build_model
from tests.checkpoint_ranks import State, built, full_state, local_state, on_ranks, step
from tests.world_cases import world_case

MLP = Model(family="mlp", width=3, hidden=5, bias=True)
TIED = Model(family="embedding", width=3, vocab=5, hidden=1, tied=True, buffers=True)
FROZEN = Model(family="mlp", units=2, width=3, hidden=2, frozen="first_unit")
ADAPTED = Model(family="mlp", width=3, hidden=5, lora_rank=2)
ADAMW = Optimizer(kind="adamw", schedule="cosine", weight_decay=0.0625)


def case_of(strategy: Strategy, shape: tuple[int, ...], model: Model = MLP, **fields: Any) -> Case:
    return world_case(strategy, mesh=shape, model=model, **({"optimizer": ADAMW} | fields))


def refusal(engine: FsdpEngine, path: Path) -> str:
    """The message, the same on all ranks; nothing of the engine has changed."""
    before = local_state(engine)
    try:
        engine.load(path)
    except CheckpointError as error:
        after = local_state(engine)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
        return str(error)
    raise AssertionError(f"{path} was loaded")


def cut(content: bytes, *, at: int) -> bytes:
    return content[:at]


def flipped(content: bytes, *, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]


def refuse_damaged(root: Path, strategy: Strategy) -> int:
    """Every file cut at several places, flipped in several bits, and gone."""
    case = case_of(strategy, (2,))
    engine = built(case)
    step(engine, case)
    whole = engine.save(root)
    step(engine, case)
    names = sorted(path.name for path in whole.iterdir())
    num_refused = 0
    for name in names:
        size = (whole / name).stat().st_size
        cuts = [partial(cut, at=at) for at in (0, 1, size // 2, size - 1)]
        places = (0, 9, size // 3, size // 2, size - 2, size - 1)
        flips = [partial(flipped, at=at) for at in places]
        for spoil in [*cuts, *flips, None]:
            copy = root.parent / "copy"
            if dist.get_rank() == 0:
                shutil.rmtree(copy, ignore_errors=True)
                shutil.copytree(whole, copy)
                if spoil is None:
                    (copy / name).unlink()
                else:
                    (copy / name).write_bytes(spoil((whole / name).read_bytes()))
            dist.barrier()
            assert refusal(engine, copy)
            num_refused += 1
            dist.barrier()
    engine.load(root)
    return num_refused


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_a_damaged_file_is_refused_before_anything_is_touched(
    tmp_path: Path, strategy: Strategy
) -> None:
    num_files = 3
    assert on_ranks(2, refuse_damaged, tmp_path / "root", strategy) == [num_files * 11] * 2


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest and state its new digest: only its meaning is wrong then."""
    content = json.loads((folder / MANIFEST).read_text())["content"]
    change(content)
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    (folder / MANIFEST).write_text(f'{{"sha256":"{digest}","content":{text}}}\n')


def refuse_foreign(root: Path) -> dict[str, str]:
    """Checkpoints that are whole and of something else."""
    case = case_of("fsdp2", (2,))
    engine = built(case)
    step(engine, case)
    others = {
        "another width": case_of("fsdp2", (2,), dataclasses.replace(MLP, hidden=4)),
        "fewer units": case_of("fsdp2", (2,), dataclasses.replace(MLP, bias=False)),
        "another dtype": case_of("fsdp2", (2,), dtypes=DTYPE_POLICIES["fp64"]),
        "another optimizer": case_of("fsdp2", (2,), optimizer=Optimizer()),
    }
    told = {}
    for name, other in others.items():
        told[name] = refusal(engine, built(other).save(root / name))
    changes: dict[str, Callable[[dict[str, Any]], None]] = {
        "a slot is missing": lambda c: c["tensors"].pop("optimizer/step/head.bias"),
        "a name too many": lambda c: c["tensors"].update(
            {"optimizer/step/other": {"shape": [], "dtype": "float32"}}
        ),
        "no schedule": lambda c: c.update(schedule=None),
        "an unknown field": lambda c: c.update(extra=1),
        "another format": lambda c: c.update(format="other"),
    }
    for name, change in changes.items():
        folder = engine.save(root / name)
        if dist.get_rank() == 0:
            rewrite(folder, change)
        dist.barrier()
        told[name] = refusal(engine, folder)
    for name in ("nothing", "an empty folder", "a folder of other files"):
        if dist.get_rank() == 0 and name != "nothing":
            (root / name).mkdir()
        if dist.get_rank() == 0 and name == "a folder of other files":
            torch.save({"model": 1}, root / name / "model.pt")
        dist.barrier()
        told[name] = refusal(engine, root / name)
    return told


def test_what_is_not_of_this_engine_is_refused_with_its_reason(tmp_path: Path) -> None:
    told, other = on_ranks(2, refuse_foreign, tmp_path)
    assert told == other
    expected = {
        "another width": "model/layers.0.up.weight is float32 (4, 3); legal is float32 (5, 3)",
        "fewer units": "lacks ['model/head.bias'",
        "another dtype": "is float64 (4, 3); legal is float32 (4, 3)",
        "another optimizer": "optimizer SGD; legal is AdamW",
        "a slot is missing": "lacks ['optimizer/step/head.bias']",
        "a name too many": "optimizer state of other, which is no parameter",
        "no schedule": "no schedule of 1 parameter groups",
        "an unknown field": "not the manifest of a checkpoint",
        "another format": "not the manifest of a checkpoint",
        "nothing": "no such folder",
        "an empty folder": "no checkpoint in it",
        "a folder of other files": "no checkpoint in it",
    }
    assert told.keys() == expected.keys()
    for name, part in expected.items():
        assert part in told[name], told[name]


def keep(root: Path) -> list[list[str]]:
    case = case_of("fsdp1", (1,))
    engine = built(case)
    kept = []
    for max_to_keep in (2, 2, 2, 2, 1, 3, 3, 3, 3, None, 1):
        engine.save(root, max_to_keep=max_to_keep)
        kept.append(sorted(path.name.lstrip("0") for path in root.iterdir()))
        engine.load(root)
    for illegal in (0, -1):
        with pytest.raises(ConfigError, match="max_to_keep"):
            engine.save(root, max_to_keep=illegal)
    return [*kept, sorted(path.name.lstrip("0") for path in root.iterdir())]


def test_the_newest_are_kept_and_no_more(tmp_path: Path) -> None:
    (kept,) = on_ranks(1, keep, tmp_path)
    assert [" ".join(names) for names in kept] == [
        "1", "1 2", "2 3", "3 4", "5", "5 6", "5 6 7", "6 7 8", "7 8 9", "10 7 8 9", "11", "11",
    ]  # fmt: skip


def save_from(root: Path, shape: tuple[int, ...]) -> dict[str, State]:
    """By both strategies, every kind of model."""
    states = {}
    for strategy in STRATEGIES:
        for name, model in MODELS.items():
            case = case_of(strategy, shape, model)
            engine = built(case)
            step(engine, case)
            folder = engine.save(root / f"{strategy}{shape}{name}")
            states[str(folder)] = full_state(engine)
    return states


def load_all(folders: list[str], shape: tuple[int, ...]) -> dict[str, State]:
    """By the strategy that did not save; a step follows."""
    states = {}
    for folder in folders:
        saved_by, model = Path(folder).parent.name[:5], Path(folder).parent.name.rpartition(")")[2]
        strategy: Strategy = "fsdp1" if saved_by == "fsdp2" else "fsdp2"
        case = case_of(strategy, shape, MODELS[model])
        engine = built(case)
        loaded = engine.load(folder)
        assert str(loaded.path) == folder
        states[folder] = full_state(engine)
        _, norm, _ = step(engine, case)
        assert norm > 0
    return states


STRATEGIES: tuple[Strategy, ...] = ("fsdp1", "fsdp2")
MODELS = {"mlp": MLP, "tied": TIED, "frozen": FROZEN}
SHAPES = ((1,), (2, 1), (3,), (2, 2))


def test_every_world_goes_on_from_every_other(tmp_path: Path) -> None:
    """Worlds of one to four ranks, 1-D and 2-D meshes, FSDP1 from FSDP2 and the other way."""
    saved: dict[str, State] = {}
    for shape in SHAPES:
        first, *others = on_ranks(torch.Size(shape).numel(), save_from, tmp_path, shape)
        assert all(other == first for other in others)
        saved |= first
    for shape in SHAPES:
        for states in on_ranks(torch.Size(shape).numel(), load_all, list(saved), shape):
            assert states == saved


def go_on_without_optimizer(root: Path) -> tuple[str, int]:
    case = case_of("fsdp2", (2,), ADAPTED)
    engine = built(case)
    step(engine, case)
    engine.save(root / "training")
    config, optimizer = configs(case)
    forward_only = FsdpEngine(
        build_model(case),
        dataclasses.replace(config, forward_only=True),
        optimizer,
        device=torch.device("cpu"),
    )
    forward_only.load(root / "training")
    both = [local_parameters(each) for each in (engine, forward_only)]
    assert both[0].keys() == both[1].keys()
    assert all(torch.equal(both[0][name], both[1][name]) for name in both[0])
    forward_only.save(root / "model")
    return refusal(engine, root / "model"), len(both[0])


def local_parameters(engine: FsdpEngine) -> dict[str, torch.Tensor]:
    return {shard.name: shard.data for shard in engine.parameters() if shard.data is not None}


def test_an_engine_without_optimizer_takes_the_weights_alone(tmp_path: Path) -> None:
    (told, num_parameters), _ = on_ranks(2, go_on_without_optimizer, tmp_path)
    assert "optimizer none; legal is AdamW" in told
    assert num_parameters == 7

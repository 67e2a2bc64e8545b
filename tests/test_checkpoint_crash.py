"""A saver that is killed anywhere leaves a whole checkpoint: the one before, or the new one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch.distributed as dist

from fsdp_engine.contract.case import Case, Optimizer
from fsdp_engine.contract.model import Model
from tests.checkpoint_ranks import Killer, State, built, full_state, on_ranks, step
from tests.world_cases import world_case

NEVER = 1 << 30
NUM_KILLS = 20


def crash_case(world_size: int = 2) -> Case:
    return world_case(
        "fsdp2",
        mesh=(world_size,),
        model=Model(family="mlp", width=3, hidden=5, bias=True),
        optimizer=Optimizer(kind="adamw", schedule="cosine"),
    )


def save_twice(
    root: Path, max_to_keep: int | None, victim: int, at: int
) -> tuple[State, State, int]:
    """Both states, and how many file operations the second save took on this rank."""
    case = crash_case()
    engine = built(case)
    step(engine, case)
    engine.save(root, max_to_keep=max_to_keep)
    old = full_state(engine)
    step(engine, case)
    new = full_state(engine)
    killer = Killer(root, at if dist.get_rank() == victim else NEVER)
    killer.arm()
    engine.save(root, max_to_keep=max_to_keep)
    return old, new, killer.count


def load_and_save(roots: list[Path]) -> list[tuple[State, int]]:
    """What each root has, and how many names are below it once another save is done."""
    case = crash_case(1)
    found = []
    for root in roots:
        engine = built(case)
        engine.load(root)
        state = full_state(engine)
        engine.save(root, max_to_keep=1)
        found.append((state, len(list(root.iterdir()))))
    return found


@pytest.mark.parametrize("max_to_keep", [None, 1])
def test_a_killed_saver_leaves_the_old_or_the_new_checkpoint(
    tmp_path: Path, max_to_keep: int | None
) -> None:
    whole = on_ranks(2, save_twice, tmp_path / "whole", max_to_keep, 0, NEVER)
    old, new, _ = whole[0]
    assert old != new
    points = [(rank, at) for rank in range(2) for at in range(whole[rank][2])]
    assert len(points) >= NUM_KILLS
    chosen = random.Random(0).sample(points, NUM_KILLS // 2)
    roots = [tmp_path / f"{rank}-{at}" for rank, at in chosen]
    for root, (rank, at) in zip(roots, chosen, strict=True):
        assert None in on_ranks(2, save_twice, root, max_to_keep, rank, at), (rank, at)
    ((states),) = on_ranks(1, load_and_save, [*roots, tmp_path / "whole"])
    for root, (state, num_left) in zip(roots, states, strict=False):
        assert state in (old, new), root
        assert num_left == 1, f"{root}: what the crash left is still there"
    assert states[-1][0] == new
    assert {state == new for state, _ in states[:-1]} == {False, True}

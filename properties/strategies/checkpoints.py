"""Programs that save a checkpoint, and load it again or have a damaged one refused.

A step comes before the checkpoint, so that there is optimizer state, and one behind it, so that the
newest weights are other ones than those that were saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from fsdp_engine.contract.actions import (
    Action,
    Damage,
    Infer,
    Load,
    Reject,
    Save,
    Train,
)
from properties.strategies.programs import Program, renumbered
from properties.strategies.setting import Setting

_DAMAGES: tuple[Damage, ...] = ("flipped", "missing", "truncated", "foreign")
_STRATEGIES: tuple[Literal["fsdp2", "fsdp1"], ...] = ("fsdp2", "fsdp1")


def resuming(_: Setting) -> SearchStrategy[Program]:
    """Steps that are lost between a checkpoint and its resume, into the trainee or a new one."""
    resumes = st.booleans().map(lambda fresh: [Load(fresh=fresh)])
    return _programs(resumes)


def resharding(_: Setting) -> SearchStrategy[Program]:
    """The same, into a trainee by any strategy on any mesh of as many ranks."""
    strategies = st.sampled_from(_STRATEGIES)
    return _programs(strategies.map(lambda name: [Load(fresh=True, strategy=name)]))


def saving(_: Setting) -> SearchStrategy[Program]:
    """Checkpoints between training actions, without a resume."""
    return _programs(st.just([Save()]))


def rejecting(_: Setting) -> SearchStrategy[Program]:
    """Damaged checkpoints that must not be loaded."""
    one = st.builds(Reject, damage=st.sampled_from(_DAMAGES), file=st.sampled_from((1, 2, 0)))
    return _programs(st.lists(one, min_size=1, max_size=4, unique=True))


@st.composite
def _programs(draw: DrawFn, second: SearchStrategy[Sequence[Action]]) -> Program:
    """Steps, a save, steps, `second`, steps; in half of them another save lies before."""
    actions: list[Action] = []
    if draw(st.booleans(), label="a checkpoint before"):
        actions += [*draw(_STEPS), Save()]
    actions += [*draw(_STEPS), Save(max_to_keep=draw(st.sampled_from((0, 1, 2)), label="kept"))]
    actions += [*draw(_STEPS), *draw(second, label="second"), *draw(_STEPS)]
    return renumbered(actions)


def _steps(between: Sequence[Action]) -> SearchStrategy[list[Action]]:
    """A training action with a step, and at most one other action before it."""
    step = st.sampled_from((0, 1)).map(lambda batch: Train(batch=batch, step=True))
    before = st.lists(st.sampled_from(between), max_size=1)
    return st.tuples(before, step).map(lambda pair: [*pair[0], pair[1]])


_STEPS = _steps((Train(step=True), Infer(), Train(batch=1)))

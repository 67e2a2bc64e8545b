"""Programs: lists of actions, drawn one by one, that shrink by losing actions.

What a kind of program must have is put at its end where it was not drawn. Batches are 0 and 1 in
the order of their first use. Where an action points into a batch (which rank, sequence or
micro-batch) is drawn once the batches are known.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, TypeAlias

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from fsdp_engine.contract.actions import (
    BATCH_ACTIONS,
    Action,
    Eval,
    Export,
    Freeze,
    Infer,
    Interrupt,
    Load,
    Poison,
    Restore,
    Resume,
    Train,
    Unfreeze,
)
from fsdp_engine.contract.batch import Batch, Planning, Static
from fsdp_engine.contract.model import Part
from oracles.planner import fewest_micro_batches
from properties.strategies.exports import resumed, takes, with_an_export
from properties.strategies.setting import Setting

Program: TypeAlias = tuple[Action, ...]
Programs: TypeAlias = "Callable[[Setting], SearchStrategy[Program]]"
Kind: TypeAlias = Literal[
    "train", "step", "infer", "switch", "eval", "export", "take", "resume", "poison", "interrupt",
    "toggle", "restore",
]  # fmt: skip

Phase: TypeAlias = Literal["loss", "forward", "backward"]
Value: TypeAlias = Literal["nan", "inf"]

MAX_DRAWN = 5
"""Actions of a list; what must be there adds one to four."""


def stepping(setting: Setting) -> SearchStrategy[Program]:
    """Training actions with a step, inference between them."""
    return _programs(setting, ("step", "step", "infer", "eval"), _with_a_step)


def lapsing(setting: Setting) -> SearchStrategy[Program]:
    """Training actions with a step, over two batches: what one uses another may not."""
    return _programs(setting, ("step", "infer"), _with_two_batches)


def poisoned(setting: Setting) -> SearchStrategy[Program]:
    """A training action with a non-finite loss, and a finite one with a step behind it."""
    return _programs(setting, ("poison", "step", "step", "infer"), _with_a_poison)


def interrupted(setting: Setting) -> SearchStrategy[Program]:
    """Batches that an exception ends, and a training action behind them.

    The simplest ends in backward, where gradients are there already and their sync is not.
    """
    return _programs(setting, ("interrupt", "step", "train"), _with_an_interrupt)


def inferring(setting: Setting) -> SearchStrategy[Program]:
    """Inference, eval mode and exports, and a training action behind them."""
    kinds: tuple[Kind, ...] = (
        "infer", "step", "infer", "eval", "train", "step", "export", "switch",
    )  # fmt: skip
    return _programs(setting, kinds, _with_an_infer)


def exporting(setting: Setting) -> SearchStrategy[Program]:
    """Exports of every kind, taken whole, in part or later, between and after steps."""
    kinds: tuple[Kind, ...] = ("take", "step", "take", "resume", "infer", "train", "restore")
    return _programs(setting, kinds, with_an_export)


def syncing(setting: Setting) -> SearchStrategy[Program]:
    """Base, adapter and merged weights exported one after the other, also after a step.

    Without an adapter there is nothing to merge: such a program only exports.
    """
    phases = [Export(weights=contents) for contents in setting.contents[1:]]
    layered = [replace(e, layered=True) if e.weights == "adapter" else e for e in phases]
    orders = st.one_of(st.permutations(phases), st.permutations(layered))
    before = _lists(setting, ("step", "switch", "infer", "restore"))
    return st.builds(
        lambda actions, exports: renumbered([*actions[:3], *exports, Export()]), before, orders
    )


def switching(setting: Setting) -> SearchStrategy[Program]:
    """Inference without the adapter and with it merged, and a training action behind them."""
    return _programs(setting, ("switch", "step", "infer"), _with_switches)


def freezing(setting: Setting) -> SearchStrategy[Program]:
    """Parts frozen and unfrozen between training actions, one part at a time."""
    return _programs(setting, ("toggle", "step", "step", "train", "infer"), _with_a_toggle)


def restoring(setting: Setting) -> SearchStrategy[Program]:
    """The parameters of the start written back after a step, and a training action behind that.

    In half of them inference comes right before: what that may have left gathered is out of date.
    """
    kinds: tuple[Kind, ...] = ("step", "infer", "eval", "restore")
    plain = _programs(setting, kinds, _with_a_restore)
    return st.one_of(plain, _programs(setting, kinds, _with_an_infer_before_restoring))


def placed(
    draw: DrawFn, program: Program, batches: tuple[Batch, ...], planning: Planning
) -> Program:
    """The program with its actions' places in the batches drawn."""
    return tuple(_placed(draw, action, batches, planning) for action in program)


def num_batches(program: Program) -> int:
    """How many batches a program names."""
    named = [action.batch for action in program if isinstance(action, BATCH_ACTIONS)]
    return max(named, default=0) + 1


@st.composite
def _programs(
    draw: DrawFn,
    setting: Setting,
    kinds: tuple[Kind, ...],
    completed: Callable[[list[Action], Setting], list[Action]],
) -> Program:
    drawn = draw(_lists(setting, kinds), label="actions")
    return renumbered(resumed(_toggled(completed(drawn, setting), setting)))


@functools.cache
def _lists(setting: Setting, kinds: tuple[Kind, ...]) -> SearchStrategy[list[Action]]:
    """Kept: making the strategies takes longer than drawing from them."""
    missing = {"toggle": not setting.parts, "switch": not setting.switches}
    allowed = [kind for kind in kinds if not missing.get(kind, False)]
    actions = _actions(setting)
    action = st.sampled_from(allowed).flatmap(actions.__getitem__)
    return st.lists(action, max_size=MAX_DRAWN)


def _actions(setting: Setting) -> dict[Kind, SearchStrategy[Action]]:
    """Actions by kind. A toggle is a freeze here, with what to freeze where nothing is frozen."""
    batch = st.sampled_from((0, 1))
    phase: SearchStrategy[Phase] = st.sampled_from(("backward", "loss", "forward"))
    value: SearchStrategy[Value] = st.sampled_from(("nan", "inf"))
    return {
        "train": st.builds(Train, batch=batch),
        "step": st.builds(Train, batch=batch, step=st.just(True)),  # noqa: FBT003  Hypothesis's own
        "infer": st.builds(Infer, batch=batch),
        "eval": st.builds(Eval),
        "export": st.builds(Export),
        "take": takes(setting),
        "resume": st.builds(Resume),
        "switch": st.builds(Infer, batch=batch, adapter=st.sampled_from(setting.switches)),
        "poison": st.builds(Poison, batch=batch, value=value),
        "interrupt": st.builds(Interrupt, batch=batch, phase=phase),
        "restore": st.builds(Restore),
        "toggle": st.builds(Freeze, part=st.sampled_from(setting.parts)),
    }


def _with_a_step(actions: list[Action], _: Setting) -> list[Action]:
    return actions if any(map(_steps, actions)) else [*actions, Train(step=True)]


def _with_two_batches(actions: list[Action], _: Setting) -> list[Action]:
    stepped = [action.batch for action in actions if isinstance(action, Train)] or [0]
    if len(set(stepped)) == 2:
        return actions
    first = [] if any(map(_steps, actions)) else [Train(step=True)]
    return [*actions, *first, Train(batch=1 - stepped[0], step=True)]


def _with_a_poison(actions: list[Action], _: Setting) -> list[Action]:
    return _ending(actions, Poison(), Train(batch=1, step=True), is_last=_steps)


def _with_an_interrupt(actions: list[Action], _: Setting) -> list[Action]:
    return _ending(actions, Interrupt(phase="backward"), Train(batch=1))


def _with_an_infer(actions: list[Action], _: Setting) -> list[Action]:
    if any(isinstance(action, Eval | Export) for action in actions):
        return _ending(actions, None, Train())
    return _ending(actions, Infer(), Train())


def _with_switches(actions: list[Action], setting: Setting) -> list[Action]:
    """Every switch that the model allows; before a merged forward the merged weights."""
    if not setting.switches:
        return _ending(actions, None, Train())
    merged: list[Action] = [Export(weights="merged"), Infer(adapter="merged")]
    switches = merged if "merged" in setting.switches else []
    return [*actions, *switches, Infer(adapter="off"), Train()]


def _with_a_toggle(actions: list[Action], setting: Setting) -> list[Action]:
    """In half of the longer ones, if all is trained at first, a part trains, rests and trains."""
    toggles = sum(isinstance(action, Freeze) for action in actions)
    if setting.parts and setting.frozen == "none" and len(actions) in (3, 5):
        toggle: list[Action] = [Train(step=True), Freeze()]
        actions = [*actions, *toggle * (2 - toggles)]
    return _ending(actions, Freeze() if setting.parts else None, Train(batch=1, step=True))


def _with_a_restore(actions: list[Action], _: Setting) -> list[Action]:
    first = next(
        (index for index, action in enumerate(actions) if isinstance(action, Restore)), len(actions)
    )
    before = actions[:first] if any(map(_steps, actions[:first])) else [Train(step=True)]
    return _ending([*before, *actions[first:]], Restore(), Train(batch=1))


def _with_an_infer_before_restoring(actions: list[Action], setting: Setting) -> list[Action]:
    restoring = _with_a_restore(actions, setting)
    first = next(at for at, action in enumerate(restoring) if isinstance(action, Restore))
    return [*restoring[:first], Infer(), *restoring[first:]]


def _ending(
    actions: list[Action],
    wanted: Action | None,
    last: Train,
    *,
    is_last: Callable[[Action], bool] = lambda action: isinstance(action, Train),
) -> list[Action]:
    """The actions, with one like `wanted` among them and a training action at the end."""
    if wanted is not None and not any(isinstance(action, type(wanted)) for action in actions):
        actions = [*actions, wanted]
    return actions if actions and is_last(actions[-1]) else [*actions, last]


def _steps(action: Action) -> bool:
    return isinstance(action, Train) and action.step


def _toggled(actions: list[Action], setting: Setting) -> list[Action]:
    """Every second freeze takes back the first one, whatever part it names."""
    frozen: Part | None = None if setting.frozen == "none" else setting.frozen
    toggled: list[Action] = []
    for action in actions:
        if isinstance(action, Freeze):
            toggled.append(action if frozen is None else Unfreeze(part=frozen))
            frozen = action.part if frozen is None else None
        else:
            toggled.append(action)
    return toggled


def renumbered(actions: list[Action]) -> Program:
    """Batches by the order of their first use."""
    numbers: dict[int, int] = {}
    for action in actions:
        if isinstance(action, BATCH_ACTIONS):
            numbers.setdefault(action.batch, len(numbers))
    return tuple(
        replace(action, batch=numbers[action.batch])
        if isinstance(action, BATCH_ACTIONS)
        else action
        for action in actions
    )


def _placed(draw: DrawFn, action: Action, batches: tuple[Batch, ...], planning: Planning) -> Action:
    if isinstance(action, Poison):
        ranks = batches[action.batch].ranks
        rank = draw(st.integers(0, len(ranks) - 1), label="poisoned rank")
        sequence = draw(st.integers(0, len(ranks[rank]) - 1), label="poisoned sequence")
        return replace(action, rank=rank, sequence=sequence)
    if isinstance(action, Interrupt):
        last = _num_micro_batches(batches[action.batch], planning) - 1
        at = draw(st.integers(0, last), label="interrupted micro-batch")
        return replace(action, micro_batch=at)
    if isinstance(action, Load) and action.strategy:
        shapes = _shapes(len(batches[0].ranks))
        return replace(action, shape=draw(st.sampled_from(shapes), label="mesh of the resume"))
    return action


def _shapes(world_size: int) -> tuple[tuple[int, ...], ...]:
    """Every mesh of so many ranks."""
    extents = [n for n in range(1, world_size + 1) if world_size % n == 0]
    return ((world_size,), *((world_size // n, n) for n in extents))


def _num_micro_batches(batch: Batch, planning: Planning) -> int:
    """What every engine makes at least."""
    if isinstance(planning, Static):
        return len(batch.ranks[0]) // planning.sequences
    return fewest_micro_batches(batch, planning)

"""Cases by the order of their actions: what was gathered, frozen or interrupted before what."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from fsdp_engine.contract.actions import (
    BATCH_ACTIONS,
    Action,
    Export,
    Freeze,
    Infer,
    Interrupt,
    Poison,
    Restore,
    Train,
    Unfreeze,
    asks_for_step,
)
from fsdp_engine.contract.case import Case
from fsdp_engine.workload.models import parameter_names, part_names, trained_names, unit_of
from properties.issues.usage import loss_tokens, num_micro_batches, training

_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def steps(case: Case) -> bool:
    """Some action asks for an optimizer step."""
    return any(map(asks_for_step, case.program))


def trains(case: Case) -> bool:
    """Some action trains a batch."""
    return any(isinstance(action, Train | Poison) for action in case.program)


def runs(case: Case) -> bool:
    """Some action runs the model."""
    return any(isinstance(action, BATCH_ACTIONS) for action in case.program)


def exports_after_training(case: Case, *, at_once: bool) -> bool:
    """Some export comes behind a batch that was trained; `at_once`: right behind it."""
    trained = False
    for action in case.program:
        if isinstance(action, Export):
            if trained:
                return True
        elif isinstance(action, Train | Poison | Interrupt):
            trained = True
        elif at_once:
            trained = False
    return False


def never_frozen(case: Case) -> bool:
    """Every parameter takes gradients from the first action to the last."""
    changed = any(isinstance(action, Freeze | Unfreeze) for action in case.program)
    return case.model.frozen == "none" and not case.model.lora_rank and not changed


def rounds_in_reduce(case: Case) -> bool:
    """The reduce dtype is coarser than the storage dtype."""
    return _BYTES[case.dtypes.reduce] < _BYTES[case.dtypes.storage]


def is_alive(case: Case) -> bool:
    """The gradients of head and units are almost surely not zero, so that wrong ones show.

    Blocks add to what goes through them, so something reaches the head; and a block's gradient is
    zero only where all of its hidden values are negative, for every token.
    """
    tokens = min(sum(s.length for s in batch.sequences) for batch in case.batches)
    residual = case.model.family not in ("linear", "mixtral") and case.model.vocab > 1
    return residual and not case.exact and tokens * case.model.hidden >= 24


def surely_rounds_a_sum(case: Case) -> bool:
    """Two micro-batches have loss, and a gradient many elements: where sums round, one does."""
    model = case.model
    many = model.width * model.vocab >= 16 and not model.lora_rank and model.optional == "none"
    two = any(
        sum(tokens > 0 for tokens in loss_tokens(case, action.batch)) > 1
        for action in training(case)
    )
    return many and two and is_alive(case)


def was_interrupted(case: Case, *, unknown: bool) -> Iterator[Interrupt]:
    """The interrupts that raise and have a batch behind them."""
    for index, action in enumerate(case.program):
        if isinstance(action, Interrupt) and _goes_on(case.program[index + 1 :]):
            count = num_micro_batches(case, action.batch)
            if unknown if count is None else action.micro_batch < count:
                yield action


def leaves_accumulators(case: Case) -> bool:
    """FSDP2: an interrupted batch that leaves gradients, then at once one that is trained."""
    for before, after in itertools.pairwise(case.program):
        if not isinstance(before, Interrupt) or not isinstance(after, Train):
            continue
        count = num_micro_batches(case, before.batch)
        if count is not None and before.micro_batch < count:
            waits = case.engine.deferred and before.micro_batch > 0
            if waits or before.phase == "backward":
                return case.model.optional == "none" and never_frozen(case)
    return False


def restores_what_is_gathered(case: Case) -> bool:
    """Weights moved, were gathered by a forward without backward, restored, and used again."""
    moved = gathered = stale = False
    for action in case.program:
        if stale and isinstance(action, BATCH_ACTIONS):
            return True
        match action:
            case Infer():
                gathered = gathered or moved
            case Restore():
                stale = stale or gathered
                moved = False
            case Train() | Poison() | Interrupt():
                gathered = False
                moved = moved or (isinstance(action, Train) and action.step)
            case _:
                pass
    return False


def trains_after_inference(case: Case) -> bool:
    """A forward without backward gathers, and a batch comes at once behind it."""
    return case.mesh.shards > 1 and any(
        isinstance(before, Infer) and isinstance(after, Train)
        for before, after in itertools.pairwise(case.program)
    )


def infers(case: Case) -> bool:
    """A forward without backward gathers what is sharded."""
    return case.mesh.shards > 1 and any(isinstance(action, Infer) for action in case.program)


def trains_again(case: Case, *, at_once: bool) -> bool:
    """A batch is trained, then another; `at_once`: right behind it."""
    places = [index for index, action in enumerate(case.program) if isinstance(action, Train)]
    gaps = [after - before for before, after in itertools.pairwise(places)]
    return (1 in gaps) if at_once else bool(gaps)


def surely_restores(case: Case) -> bool:
    """The same, where the root has moved far enough to be seen and the next batch is trained."""
    moves = case.optimizer.lr > 0 and not case.optimizer.warmup_steps
    moves = moves and case.dtypes.compute in ("float32", "float64")
    restored = restores_what_is_gathered(case)
    steady = never_frozen(case) and is_alive(case)
    simple = all(isinstance(action, Train | Infer | Restore) for action in case.program)
    return restored and moves and steady and simple


def may_be_interrupted(case: Case) -> bool:
    """An exception may end a batch, and another batch comes behind it."""
    return any(was_interrupted(case, unknown=True))


def interrupts_forward(case: Case) -> bool:
    """A forward is interrupted for sure, and a batch comes behind it."""
    return any(action.phase == "forward" for action in was_interrupted(case, unknown=False))


def toggles_what_is_gathered(case: Case) -> frozenset[str]:
    """Names frozen or unfrozen between a forward without backward and the next batch."""
    gathered = False
    toggled: set[str] = set()
    found: set[str] = set()
    for action in case.program:
        match action:
            case Infer():
                gathered = True
            case Train() | Poison() | Interrupt():
                found |= toggled
                gathered = False
                toggled = set()
            case Freeze() | Unfreeze() if gathered:
                toggled ^= set(part_names(case, action.part))
            case _:
                pass
    return frozenset(found)


def toggles_what_stays(case: Case, *, surely: bool) -> bool:
    """Of what is toggled so, something stays gathered: the root, or without reshard every unit."""
    toggled = toggles_what_is_gathered(case)
    if not case.engine.reshard_after_forward:
        return bool(toggled) and (not surely or case.model.optional == "none")
    return not surely and any(not unit_of(case, name) for name in toggled)


def trains_what_began_frozen(case: Case, *, must_raise: bool) -> bool:
    """A unit is wholly frozen in the first forward and trains later.

    `must_raise`: only where its gradient comes in another dtype than that of storage.
    """
    began: frozenset[str] | None = None
    for action, frozen in _with_frozen(case):
        if not isinstance(action, BATCH_ACTIONS):
            continue
        if began is None:
            began = frozenset(
                unit for unit, names in _units(case).items() if names and names <= frozen
            )
        if isinstance(action, Infer):
            continue
        trains_now = any(_units(case)[unit] - frozen for unit in began)
        if trains_now and (not must_raise or _is_refused(case, action)):
            return True
    return False


def _is_refused(case: Case, action: Action) -> bool:
    """FSDP2 does not cast the gradient of such a unit; torch refuses one of another dtype."""
    assert isinstance(action, Train | Poison | Interrupt)
    dtypes = case.dtypes
    count = num_micro_batches(case, action.batch)
    if count is None or isinstance(action, Interrupt):
        return False
    accumulates = case.engine.deferred and count > 1
    return (dtypes.reduce if accumulates else dtypes.compute) != dtypes.storage


def _with_frozen(case: Case) -> Iterator[tuple[Action, frozenset[str]]]:
    """Every action with what is frozen when it begins."""
    frozen = frozenset(parameter_names(case.model)) - trained_names(case.model)
    for action in case.program:
        yield action, frozen
        if isinstance(action, Freeze):
            frozen |= set(part_names(case, action.part))
        elif isinstance(action, Unfreeze):
            frozen -= set(part_names(case, action.part))


def _units(case: Case) -> dict[str, frozenset[str]]:
    """The parameters of every unit; the root's name is empty."""
    names = parameter_names(case.model)
    units = {unit_of(case, name) for name in names}
    return {unit: frozenset(n for n in names if unit_of(case, n) == unit) for unit in units}


def _goes_on(actions: tuple[Action, ...]) -> bool:
    return any(isinstance(action, BATCH_ACTIONS) for action in actions)

"""From the case a search ended at to the simplest one that fails alike, and to one that passes.

A search varies what its row leaves open. Here every setting is tried at its simplest value, the
row's own included: fewer ranks, a linear model for a transformer, no optimizer, sequences that are
all alike. Each is kept only where the same property still fails in the same way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

from fsdp_engine.contract.actions import BATCH_ACTIONS, Poison, Train
from fsdp_engine.contract.batch import Batch, Sequence, Static
from fsdp_engine.contract.case import Case, DtypePolicy, EngineOptions, Mesh, Optimizer
from fsdp_engine.contract.errors import CaseError
from fsdp_engine.contract.model import Family, Model

Seen: TypeAlias = Literal["fails", "passes", "otherwise"]
"""How a case ends: in the failure that is looked at, in a pass, or in anything else."""

Step: TypeAlias = tuple[str, Callable[[Case], Case]]
"""What is changed, in words, and the change."""

MAX_SECONDS = 15.0
_SHAPES = ((1,), (2,), (1, 2), (2, 1), (3,), (4,), (2, 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Minimised:
    """The simplest case that fails, and neighbours of it that pass, the nearest first.

    `controls` have in words what is different in them. `num_cases` were run.
    """

    case: Case
    controls: tuple[tuple[str, Case], ...]
    num_cases: int


def minimise(
    case: Case, look: Callable[[Case], Seen], *, max_seconds: float = MAX_SECONDS
) -> Minimised:
    """Simplify a failing case until nothing more can be taken, or the time is over."""
    ends = time.monotonic() + max_seconds
    known: dict[Case, Seen] = {case: "fails"}

    def seen(candidate: Case) -> Seen:
        if candidate not in known:
            known[candidate] = "otherwise" if time.monotonic() > ends else look(candidate)
        return known[candidate]

    simplified = True
    while simplified:
        simplified = False
        for _, candidate in _neighbours(case, _SIMPLER):
            if seen(candidate) == "fails":
                case, simplified = candidate, True
                break
    passing = [(told, at) for told, at in _neighbours(case, _SIMPLER) if seen(at) == "passes"]
    if not passing:
        passing = [(told, at) for told, at in _neighbours(case, _ASIDE) if seen(at) == "passes"]
    order = [name for name, _ in (*_NEAR, *_SIMPLER, *_ASIDE)]
    passing.sort(key=lambda item: order.index(item[0]))
    return Minimised(case=case, controls=tuple(passing), num_cases=len(known) - 1)


def _neighbours(case: Case, steps: tuple[Step, ...]) -> Iterator[tuple[str, Case]]:
    """The legal cases one step away."""
    for told, step in steps:
        try:
            candidate = step(case)
        except CaseError:
            continue
        if candidate != case:
            yield told, candidate


def _on_mesh(shape: tuple[int, ...]) -> Callable[[Case], Case]:
    def step(case: Case) -> Case:
        mesh, now = Mesh(shape=shape), case.mesh
        if (mesh.world_size, mesh.ndim) >= (now.world_size, now.ndim):
            return case
        batches = tuple(Batch(ranks=batch.ranks[: mesh.world_size]) for batch in case.batches)
        return replace(case, mesh=mesh, batches=batches)

    return step


def _with_engine(**changed: object) -> Callable[[Case], Case]:
    return lambda case: replace(case, engine=replace(case.engine, **changed))  # type: ignore[arg-type]  # fields by name


def _with_model(**changed: object) -> Callable[[Case], Case]:
    return lambda case: replace(case, model=replace(case.model, **changed))  # type: ignore[arg-type]  # fields by name


def _with_family(family: Family, **changed: object) -> Callable[[Case], Case]:
    """The same model of a simpler family."""
    change = _with_model(family=family, **changed)
    order = get_args(Family)
    return lambda case: (
        change(case) if order.index(family) < order.index(case.model.family) else case
    )


def _one_batch(case: Case) -> Case:
    train = next((a for a in case.program if isinstance(a, Train)), Train())
    return replace(case, program=(replace(train, step=False),))


def _without_action(index: int) -> Callable[[Case], Case]:
    def step(case: Case) -> Case:
        program = case.program[:index] + case.program[index + 1 :]
        return replace(case, program=program) if program else case

    return step


def _without_steps(case: Case) -> Case:
    program = tuple(replace(a, step=False) if isinstance(a, Train) else a for a in case.program)
    return replace(case, program=program)


def _used_batches(case: Case) -> Case:
    """Only the batches that are used, numbered anew."""
    used = sorted({action.batch for action in case.program if isinstance(action, BATCH_ACTIONS)})
    places = {old: new for new, old in enumerate(used)}
    program = tuple(
        replace(action, batch=places[action.batch]) if isinstance(action, BATCH_ACTIONS) else action
        for action in case.program
    )
    return replace(case, program=program, batches=tuple(case.batches[i] for i in used or [0]))


def _over_sequences(change: Callable[[Sequence], Sequence]) -> Callable[[Case], Case]:
    def step(case: Case) -> Case:
        batches = tuple(
            Batch(ranks=tuple(tuple(map(change, rank)) for rank in batch.ranks))
            for batch in case.batches
        )
        return replace(case, batches=batches)

    return step


def _fewer_sequences(count: int) -> Callable[[Case], Case]:
    def step(case: Case) -> Case:
        if any(isinstance(action, Poison) for action in case.program):
            return case
        batches = tuple(
            Batch(ranks=tuple(rank[:count] for rank in batch.ranks)) for batch in case.batches
        )
        return replace(case, batches=batches)

    return step


_NEAR: tuple[Step, ...] = (
    ("eager sync", _with_engine(deferred=False, config_source="dataclass")),
    ("resharding after forward", _with_engine(reshard_after_forward=True)),
    ("fp32 throughout", lambda case: replace(case, dtypes=DtypePolicy())),
)

_SIMPLER: tuple[Step, ...] = (
    ("one batch, no optimizer", _one_batch),
    ("no optimizer step", _without_steps),
    ("the default optimizer", lambda case: replace(case, optimizer=Optimizer())),
    *((f"without action {index}", _without_action(index)) for index in range(6)),
    ("only the batches in use", _used_batches),
    ("the simplest model", lambda case: replace(case, model=Model())),
    ("a stack of linear layers", _with_family("linear", tied=False)),
    ("an MLP", _with_family("mlp", tied=False)),
    ("an embedding and an MLP", _with_family("embedding")),
    ("no adapter", _with_model(lora_rank=0, lora_targets="units")),
    ("no tied weights", _with_model(tied=False)),
    ("nothing frozen", _with_model(frozen="none")),
    ("no optional part", _with_model(optional="none")),
    ("no buffers", _with_model(buffers=False)),
    ("no bias", _with_model(bias=False)),
    ("one unit", _with_model(units=1)),
    ("small layers", _with_model(width=4, hidden=4, vocab=4)),
    *((f"on mesh {shape}", _on_mesh(shape)) for shape in _SHAPES),
    ("default engine options", lambda case: replace(case, engine=EngineOptions())),
    *_NEAR,
    ("one sequence a micro-batch", _with_engine(planning=Static())),
    ("the mean over tokens", _with_engine(loss_mode="token-mean")),
    ("no overrides", _with_engine(overrides=())),
    ("one sequence a rank", _fewer_sequences(1)),
    ("two sequences a rank", _fewer_sequences(2)),
    ("sequences all alike", _over_sequences(lambda s: Sequence(key=s.key))),
    ("sequences that use everything", _over_sequences(lambda s: replace(s, gated=True))),
    ("seed 0", lambda case: replace(case, seed=0)),
)
"""Every field at its simplest value; what changes most comes first."""

_ASIDE: tuple[Step, ...] = (
    ("deferred sync", _with_engine(deferred=True)),
    ("no resharding after forward", _with_engine(reshard_after_forward=False)),
    ("FSDP2", _with_engine(strategy="fsdp2")),
    ("FSDP1", _with_engine(strategy="fsdp1")),
)
"""Neighbours that are no simpler: they may pass where no simpler one does."""

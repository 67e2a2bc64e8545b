"""Whole cases: a row of the main axes fixes what it names, the rest is drawn.

All cases are legal by construction. They shrink to the row's simplest: the smallest mesh, one unit,
one micro-batch of short sequences, one train action, seed 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal, TypeAlias, cast, get_args

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from fsdp_engine.contract.actions import Export, Infer, Train, asks_for_step
from fsdp_engine.contract.case import (
    DTYPE_POLICIES,
    Case,
    ConfigSource,
    EngineOptions,
    LossMode,
    Optimizer,
    Strategy,
)
from properties.covering import FACTORS, Axes, factors, is_possible
from properties.strategies import checkpoints, programs
from properties.strategies.batches import batches, made_exact, planning_for, plans, ungated
from properties.strategies.meshes import meshes
from properties.strategies.models import models
from properties.strategies.programs import Program, Programs, num_batches, placed
from properties.strategies.regions import can_be_exact
from properties.strategies.setting import Setting

CasesOfRow: TypeAlias = Callable[[Axes], SearchStrategy[Case]]

_LOSS_MODES: tuple[LossMode, ...] = get_args(LossMode)


_TRAINING: tuple[Program, ...] = (
    (Train(),),
    (Train(), Train(batch=1)),
    (Infer(), Train()),
    (Train(), Infer(batch=1), Train(batch=1)),
    (Train(batch=1), Train(), Train(batch=1)),
)
_EXPORTING: tuple[Program, ...] = (
    (Export(),),
    (Export(), Export()),
    (Export(staging="force"), Export(staging="skip")),
    (Train(step=True), Export()),
    (Export(), Train(step=True), Export()),
    (Train(), Export(), Train(batch=1)),
    (Export(staging="skip"), Train(step=True), Export(staging="force"), Export(staging="skip")),
)


def cases(row: Axes) -> SearchStrategy[Case]:
    """Cases of a row that train without a step: gradients depend on the case alone."""
    return _cases(row, programs=_one_of(_TRAINING))


def stepping_cases(row: Axes) -> SearchStrategy[Case]:
    """Cases of a row whose optimizer steps, with inference in between."""
    return _cases(row, programs=programs.stepping)


def poisoned_cases(row: Axes) -> SearchStrategy[Case]:
    """Cases of a row with a non-finite loss on one rank, and a finite step behind it."""
    return _cases(row, programs=programs.poisoned)


def interrupted_cases(row: Axes) -> SearchStrategy[Case]:
    """Cases of a row with batches that an exception ends, and a training action behind them."""
    return _cases(row, programs=programs.interrupted, several=True)


def inferring_cases(row: Axes) -> SearchStrategy[Case]:
    """Cases of a row with inference and exports before, between and after training actions."""
    return _cases(row, programs=programs.inferring, moving=True)


def freezing_cases(row: Axes) -> SearchStrategy[Case]:
    """Cases of a row that freeze and unfreeze parts between training actions.

    With an adapter nothing can be frozen: such a row only trains.
    """
    return _cases(row, programs=programs.freezing, moving=True)


def restoring_cases(row: Axes) -> SearchStrategy[Case]:
    """Cases of a row that write the first parameters back after a step, then train."""
    return _cases(row, programs=programs.restoring, moving=True)


def resuming_cases(row: Axes) -> SearchStrategy[Case]:
    """Cases of a row that go back to a checkpoint and on from there."""
    return _cases(row, programs=checkpoints.resuming, adaptive=True, moving=True)


def resharding_cases(row: Axes) -> SearchStrategy[Case]:
    """Cases of a row that go on from a checkpoint on another mesh, by another strategy."""
    return _cases(row, programs=checkpoints.resharding, adaptive=True, moving=True)


def saving_cases(row: Axes) -> SearchStrategy[Case]:
    """Cases of a row that save between training actions."""
    return _cases(row, programs=checkpoints.saving, adaptive=True, moving=True)


def rejecting_cases(row: Axes) -> SearchStrategy[Case]:
    """Cases of a row in which a damaged checkpoint must be refused."""
    return _cases(row, programs=checkpoints.rejecting, adaptive=True, moving=True)


def grouped_cases(row: Axes) -> SearchStrategy[Case]:
    """Cases of a row in which groups of sequences stay together."""
    return st.sampled_from((2, 3)).flatmap(
        lambda group: _cases(row, programs=_one_of(_TRAINING), group=group, several=True)
    )


def unused_cases(row: Axes) -> SearchStrategy[Case]:
    """Cases of a row with steps of AdamW over two batches, one without a use of optional parts."""
    return _cases(row, programs=programs.lapsing, unused=True, moving=True)


def exporting_cases(row: Axes) -> SearchStrategy[Case]:
    """Cases of a row that export before, between and after train actions."""
    return _cases(row, programs=_exporting)


def adapted_cases(row: Axes) -> SearchStrategy[Case]:
    """Cases of a row, with an adapter, that export before, between and after train actions."""
    return _cases(replace(row, adapter="lora"), programs=programs.exporting)


def syncing_cases(row: Axes) -> SearchStrategy[Case]:
    """Cases of a row, with an adapter, that export base, adapter and merged weights."""
    return _cases(replace(row, adapter="lora"), programs=programs.syncing, moving=True)


def switching_cases(row: Axes) -> SearchStrategy[Case]:
    """Cases of a row, with an adapter, that infer without it and with it merged."""
    return _cases(replace(row, adapter="lora"), programs=programs.switching, moving=True)


def exact_cases(row: Axes) -> SearchStrategy[Case]:
    """Cases of a row with dyadic weights, data and normalisers; see `can_be_exact`."""
    return _cases(row, programs=_one_of(_TRAINING), exact=True)


_DRAWS: tuple[CasesOfRow, ...] = (
    cases,
    stepping_cases,
    exporting_cases,
    poisoned_cases,
    interrupted_cases,
    inferring_cases,
    freezing_cases,
    restoring_cases,
    grouped_cases,
    unused_cases,
    resuming_cases,
    resharding_cases,
    saving_cases,
    rejecting_cases,
)


def rows(*, max_world_size: int = 4) -> SearchStrategy[Axes]:
    """Any possible row, the simplest first."""
    axes = factors(max_world_size=max_world_size)
    values = {name: st.sampled_from(axes[name]) for name in FACTORS}
    return st.builds(Axes, **values).map(_nearest_possible)


def any_cases(*, max_world_size: int = 4) -> SearchStrategy[Case]:
    """Cases of the whole space, exact ones and every kind of program included."""

    def of_row(row: Axes) -> SearchStrategy[Case]:
        draws = (*_DRAWS, exact_cases) if can_be_exact(row) else _DRAWS
        if row.adapter == "lora":
            draws = (*draws, syncing_cases, switching_cases)
        return st.sampled_from(draws).flatmap(lambda draw: draw(row))

    return rows(max_world_size=max_world_size).flatmap(of_row)


def _nearest_possible(row: Axes) -> Axes:
    """The row with axes set to their simplest value, last axis first, until the rules hold."""
    for name in ("adapter", "planning"):
        if is_possible(row):
            return row
        row = replace(row, **{name: FACTORS[name][0]})
    assert is_possible(row)
    return row


@st.composite
def _cases(  # noqa: PLR0913  one keyword per kind of case
    draw: DrawFn,
    row: Axes,
    *,
    programs: Programs,
    exact: bool = False,
    group: int = 1,
    unused: bool = False,
    adaptive: bool = False,
    several: bool = False,
    moving: bool = False,
) -> Case:
    """`moving`: the first step has a learning rate above zero already.

    `adaptive`: the optimizer is AdamW.
    """
    mesh = draw(meshes(row.mesh), label="mesh")
    model = draw(models(row.kind, lora=row.adapter == "lora", exact=exact), label="model")
    loss_mode = draw(st.sampled_from(_LOSS_MODES), label="loss mode")
    program = draw(programs(Setting.of(model)), label="program")
    plan = draw(
        plans(planning=row.planning, optional=model.optional, group=group, several=several),
        label="plan",
    )
    drawn = [
        draw(batches(world_size=mesh.world_size, plan=plan), label="batch")
        for _ in range(num_batches(program))
    ]
    if exact:
        drawn = [made_exact(batch, loss_mode) for batch in drawn]
    if unused:
        at = draw(st.integers(1, len(drawn)), label="batch without optional parts")
        drawn[-at] = ungated(drawn[-at])  # the last: the part may have moments by then
    planning = planning_for(tuple(drawn), plan)
    return Case(
        mesh=mesh,
        model=model,
        dtypes=DTYPE_POLICIES[row.dtypes],
        engine=EngineOptions(
            strategy=cast(Strategy, row.strategy),
            reshard_after_forward=row.reshard == "zero3",
            deferred=row.sync == "deferred",
            config_source=draw(_sources(row), label="config source"),
            planning=planning,
            loss_mode=loss_mode,
        ),
        optimizer=_optimizer(draw, program, decaying=unused, adaptive=adaptive, moving=moving),
        batches=tuple(drawn),
        program=placed(draw, program, tuple(drawn), planning),
        exact=exact,
        seed=draw(st.integers(0, (1 << 31) - 1), label="seed"),
    )


def _one_of(fixed: tuple[Program, ...]) -> Programs:
    return lambda _: st.sampled_from(fixed)


def _exporting(setting: Setting) -> SearchStrategy[Program]:
    fixed = st.sampled_from(_EXPORTING).map(lambda program: _unfused(program, setting))
    return st.one_of(fixed, programs.exporting(setting))


def _unfused(program: Program, setting: Setting) -> Program:
    """With packed experts taken apart, where the model has some."""
    return tuple(
        replace(action, unfuse=setting.fuses) if isinstance(action, Export) else action
        for action in program
    )


def _sources(row: Axes) -> SearchStrategy[ConfigSource]:
    """Half of them the dataclass, the only source that every engine has."""
    others: tuple[ConfigSource, ...] = ("yaml",)
    if row.sync == "deferred":
        # A configuration without the field that switches deferral means deferred.
        others = ("yaml", "legacy")
    return st.one_of(st.just("dataclass"), st.sampled_from(others))


def _optimizer(
    draw: DrawFn, program: Program, *, decaying: bool, adaptive: bool, moving: bool
) -> Optimizer:
    """Steps stay small enough for weights to stay finite over a whole program.

    `decaying`: AdamW with weight decay, which moves whatever is not left out of the step.
    """
    if not any(map(asks_for_step, program)):
        return Optimizer()
    # Whoever forgets a rate is seen where the next one is another.
    cosine = draw(st.sampled_from((False, *[True] * (1 + 2 * adaptive))), label="cosine schedule")
    kinds: tuple[Literal["sgd", "adamw"], ...] = ("sgd", "adamw")
    return Optimizer(
        kind=draw(st.sampled_from(kinds[decaying or adaptive :]), label="optimizer"),
        lr=draw(st.sampled_from((0.125, 0.0078125, 0.001)), label="lr"),
        weight_decay=0.0625 if decaying else draw(st.sampled_from((0.0, 0.0625)), label="decay"),
        clip_grad=draw(st.sampled_from((1.0, 0.015625, 64.0)), label="clip"),
        warmup_steps=0 if moving else draw(st.sampled_from((0, 0, 1, 2)), label="warmup"),
        schedule="cosine" if cosine else "constant",
        total_steps=draw(st.integers(1, 8), label="total steps") if cosine else 8,
        min_lr_ratio=draw(st.sampled_from((0.0, 0.25)), label="least lr") if cosine else 0.0,
    )

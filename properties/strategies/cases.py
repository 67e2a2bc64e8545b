"""Whole cases: a row of the main axes fixes what it names, the rest is drawn.

All cases are legal by construction. They shrink to the row's simplest: the smallest mesh, one unit,
one micro-batch of short sequences, one train action, seed 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias, cast, get_args

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from fsdp_engine.contract.actions import Action, Export, Infer, Train
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
from properties.strategies.batches import batches, made_exact, planning_for, plans
from properties.strategies.meshes import meshes
from properties.strategies.models import models
from properties.strategies.regions import can_be_exact

CasesOfRow: TypeAlias = Callable[[Axes], SearchStrategy[Case]]

_LOSS_MODES: tuple[LossMode, ...] = get_args(LossMode)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Program:
    """A program and the number of batches it names."""

    actions: tuple[Action, ...]
    num_batches: int = 1


_TRAINING = (
    _Program(actions=(Train(),)),
    _Program(actions=(Train(), Train(batch=1)), num_batches=2),
    _Program(actions=(Infer(), Train())),
    _Program(actions=(Train(), Infer(batch=1), Train(batch=1)), num_batches=2),
    _Program(actions=(Train(batch=1), Train(), Train(batch=1)), num_batches=2),
)
_STEPPING = (
    _Program(actions=(Train(step=True),)),
    _Program(actions=(Train(step=True), Train(batch=1, step=True)), num_batches=2),
    _Program(actions=(Train(step=True), Infer(), Train(batch=1, step=True)), num_batches=2),
)


def _exporting() -> tuple[_Program, ...]:
    staged, unstaged = Export(staging="force"), Export(staging="skip")
    return (
        _Program(actions=(Export(),)),
        _Program(actions=(Export(), Export())),
        _Program(actions=(staged, unstaged)),
        _Program(actions=(Train(step=True), Export())),
        _Program(actions=(Export(), Train(step=True), Export())),
        _Program(actions=(Train(), Export(), Train(batch=1)), num_batches=2),
        _Program(actions=(unstaged, Train(step=True), staged, unstaged)),
    )


def cases(row: Axes) -> SearchStrategy[Case]:
    """Cases of a row that train without a step: gradients depend on the case alone."""
    return _cases(row, programs=_TRAINING, exact=False)


def stepping_cases(row: Axes) -> SearchStrategy[Case]:
    """Cases of a row whose optimizer steps."""
    return _cases(row, programs=_STEPPING, exact=False)


def exporting_cases(row: Axes) -> SearchStrategy[Case]:
    """Cases of a row that export before, between and after train actions."""
    return _cases(row, programs=_exporting(), exact=False)


def exact_cases(row: Axes) -> SearchStrategy[Case]:
    """Cases of a row with dyadic weights, data and normalisers; see `can_be_exact`."""
    return _cases(row, programs=_TRAINING, exact=True)


def rows(*, max_world_size: int = 4) -> SearchStrategy[Axes]:
    """Any possible row, the simplest first."""
    axes = factors(max_world_size=max_world_size)
    values = {name: st.sampled_from(axes[name]) for name in FACTORS}
    return st.builds(Axes, **values).map(_nearest_possible)


def any_cases(*, max_world_size: int = 4) -> SearchStrategy[Case]:
    """Cases of the whole space, exact ones, steps and exports included."""

    def of_row(row: Axes) -> SearchStrategy[Case]:
        kinds = [cases, stepping_cases, exporting_cases]
        if can_be_exact(row):
            kinds.append(exact_cases)
        return st.sampled_from(kinds).flatmap(lambda kind: kind(row))

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
def _cases(draw: DrawFn, row: Axes, *, programs: tuple[_Program, ...], exact: bool) -> Case:
    mesh = draw(meshes(row.mesh), label="mesh")
    model = draw(models(row.kind, lora=row.adapter == "lora", exact=exact), label="model")
    loss_mode = draw(st.sampled_from(_LOSS_MODES), label="loss mode")
    program = draw(st.sampled_from(programs), label="program")
    plan = draw(plans(planning=row.planning, optional=model.optional), label="plan")
    drawn = [
        draw(batches(world_size=mesh.world_size, plan=plan), label="batch")
        for _ in range(program.num_batches)
    ]
    if exact:
        drawn = [made_exact(batch, loss_mode) for batch in drawn]
    return Case(
        mesh=mesh,
        model=model,
        dtypes=DTYPE_POLICIES[row.dtypes],
        engine=EngineOptions(
            strategy=cast(Strategy, row.strategy),
            reshard_after_forward=row.reshard == "zero3",
            deferred=row.sync == "deferred",
            config_source=draw(_sources(row), label="config source"),
            planning=planning_for(tuple(drawn), plan),
            loss_mode=loss_mode,
        ),
        optimizer=_optimizer(draw, program),
        batches=tuple(drawn),
        program=program.actions,
        exact=exact,
        seed=draw(st.integers(0, (1 << 31) - 1), label="seed"),
    )


def _sources(row: Axes) -> SearchStrategy[ConfigSource]:
    """Half of them the dataclass, the only source that every engine has."""
    others: tuple[ConfigSource, ...] = ("yaml",)
    if row.sync == "deferred":
        # A configuration without the field that switches deferral means deferred.
        others = ("yaml", "legacy")
    return st.one_of(st.just("dataclass"), st.sampled_from(others))


def _optimizer(draw: DrawFn, program: _Program) -> Optimizer:
    if not any(isinstance(action, Train) and action.step for action in program.actions):
        return Optimizer()
    return draw(
        st.builds(
            Optimizer,
            kind=st.sampled_from(("sgd", "adamw")),
            weight_decay=st.sampled_from((0.0, 0.0625)),
            clip_grad=st.sampled_from((1.0, 0.015625, 64.0)),
        ),
        label="optimizer",
    )

"""Cases in which parts rest on the host, by flags and by moves in between."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from fsdp_engine.contract.actions import Action, Export, Load, Move
from fsdp_engine.contract.case import Case
from fsdp_engine.contract.limits import MAX_ACTIONS
from properties.covering import Axes
from properties.strategies.cases import (
    CasesOfRow,
    exporting_cases,
    inferring_cases,
    interrupted_cases,
    resuming_cases,
)

Flags: TypeAlias = tuple[bool, bool, bool]
"""For the parameters, for the optimizer, by FSDP2's policy."""

_NONE = (False, False, False)
_BOTH = (True, True, False)
_SOME = ((True, False, False), _BOTH, (False, True, False))
_POLICY = (False, False, True)


def offloaded(cases: CasesOfRow) -> CasesOfRow:
    """Cases of a row with offload flags; half have moves between actions unless a policy rules.

    Two in five offload nothing, which every engine can do.
    """
    return lambda row: cases(row).flatmap(lambda case: _offloaded(case, (_NONE, *_SOME, _NONE)))


def large(cases: CasesOfRow) -> CasesOfRow:
    """Cases of a row, half of them with so many large units that one in full too many shows.

    Beside a small one it might be what Python holds of a micro-batch.
    """
    return lambda row: st.builds(_enlarged, cases(row), st.sampled_from(_SIZES))


_SIZES = ((1, 1, 1), (6, 8, 8))
"""Units, width and hidden width at least."""


def _enlarged(case: Case, sizes: tuple[int, int, int]) -> Case:
    units, width, hidden = sizes
    model = replace(
        case.model,
        units=max(case.model.units, units),
        width=max(case.model.width, width),
        hidden=max(case.model.hidden, hidden),
    )
    return replace(case, model=model)


@st.composite
def _offloaded(draw: DrawFn, case: Case, flags: tuple[Flags, ...]) -> Case:
    choices = (*flags, _POLICY) if _can_have_policy(case) else flags
    of_model, of_optimizer, by_policy = draw(st.sampled_from(choices), label="offload")
    engine = replace(
        case.engine,
        param_offload=of_model,
        optimizer_offload=of_optimizer,
        offload_policy=by_policy,
    )
    if by_policy or not draw(st.booleans(), label="moves"):
        return replace(case, engine=engine)
    program: list[Action] = []
    held = False
    for action in case.program:
        room = MAX_ACTIONS - len(case.program) - sum(isinstance(a, Move) for a in program)
        if room and not held and draw(st.integers(0, 2), label="move") == 2:
            program.append(draw(_moves, label="which"))
        program.append(action)
        if isinstance(action, Export) and action.drain == "hold":
            held = True
        held = held and action.kind != "resume"
    return replace(case, engine=engine, program=tuple(program))


_moves: SearchStrategy[Move] = st.builds(
    lambda to, parts: Move(to=to, model="model" in parts, optimizer="optimizer" in parts),
    st.sampled_from(("host", "device")),
    st.sampled_from((("model",), ("model", "optimizer"), ("optimizer",))),
)


def residing_cases(row: Axes) -> SearchStrategy[Case]:
    """Cases of a row with offload and every kind of action that uses what rests on the host."""
    kinds = (inferring_cases, interrupted_cases, exporting_cases, resuming_cases)
    drawn = st.one_of([cases(row) for cases in kinds])
    return drawn.flatmap(lambda case: _offloaded(case, (*_SOME, _BOTH, _NONE)))


def _can_have_policy(case: Case) -> bool:
    staged = any(isinstance(a, Export) and a.staging == "force" for a in case.program)
    elsewhere = any(isinstance(a, Load) and a.strategy == "fsdp1" for a in case.program)
    return case.engine.strategy == "fsdp2" and not staged and not elsewhere

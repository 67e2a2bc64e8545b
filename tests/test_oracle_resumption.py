"""What a program is without what its resumes have lost, and which programs are legal at all."""

from __future__ import annotations

import pytest

from fsdp_engine.contract.actions import (
    Action,
    Eval,
    Freeze,
    Infer,
    Load,
    Reject,
    Save,
    Train,
)
from fsdp_engine.contract.case import Case, case_behind
from fsdp_engine.contract.errors import CaseError
from fsdp_engine.contract.model import Model
from oracles.resumption import uninterrupted
from tests.small_cases import small_case

STEP = Train(step=True)


def programmed(*program: Action) -> Case:
    case = small_case(shape=(2,), model=Model(family="mlp"))
    return Case(mesh=case.mesh, model=case.model, batches=case.batches, program=program)


@pytest.mark.parametrize(
    ("program", "kept"),
    [
        ((STEP, Save(), STEP, Load(), Infer()), (0, 4)),
        ((Save(), STEP, Save(), STEP, Load(), STEP), (1, 5)),
        ((STEP, Save(), STEP, Load(), STEP, Infer(), Load(), Train()), (0, 7)),
        ((STEP, Save(), Reject(), Eval(), Save(), STEP, Load(fresh=True), STEP), (0, 3, 7)),
        ((STEP, Save(), STEP), (0, 2)),
    ],
)
def test_what_is_lost_is_left_out(program: tuple[Action, ...], kept: tuple[int, ...]) -> None:
    case = programmed(*program)
    shorter = uninterrupted(case)
    assert shorter is not None
    assert shorter.kept == kept
    assert shorter.case.program == tuple(program[index] for index in kept)


def test_nothing_may_be_left() -> None:
    assert uninterrupted(programmed(Save(), STEP, Load())) is None


@pytest.mark.parametrize(
    ("program", "field"),
    [
        ((STEP, Load()), "a save before a load"),
        ((Reject(), Save()), "a save before a reject"),
        ((Save(), Freeze(), Load()), "nothing frozen where there is load"),
        ((Save(), Load(fresh=True, shape=(3,))), "2 ranks"),
    ],
)
def test_illegal_programs_are_refused(program: tuple[Action, ...], field: str) -> None:
    with pytest.raises(CaseError, match=field):
        programmed(*program)


def test_another_mesh_needs_a_new_trainee() -> None:
    with pytest.raises(CaseError, match=r"load\.fresh"):
        Load(strategy="fsdp1")


def test_a_case_goes_on_where_a_resume_says() -> None:
    action = Load(fresh=True, strategy="fsdp1", shape=(2, 1))
    case = case_behind(programmed(Save(), action), action)
    assert (case.mesh.shape, case.engine.strategy) == ((2, 1), "fsdp1")
    assert case_behind(programmed(Save(), Load()), Load()) == programmed(Save(), Load())

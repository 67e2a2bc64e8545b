"""Programs reach what they are there for, and shrink by losing actions."""

from __future__ import annotations

import pytest
from hypothesis import find, given
from hypothesis.strategies import SearchStrategy

from fsdp_engine.contract.actions import (
    Export,
    Freeze,
    Infer,
    Interrupt,
    Load,
    Poison,
    Reject,
    Restore,
    Save,
    Train,
    Unfreeze,
)
from fsdp_engine.contract.case import Case
from properties.covering import Axes
from properties.strategies.cases import (
    adapted_cases,
    any_cases,
    exporting_cases,
    freezing_cases,
    grouped_cases,
    inferring_cases,
    interrupted_cases,
    poisoned_cases,
    rejecting_cases,
    resharding_cases,
    restoring_cases,
    resuming_cases,
    saving_cases,
    stepping_cases,
    switching_cases,
    syncing_cases,
    unused_cases,
)
from properties.strategies.programs import Program
from tests.drawing import SEARCH, SHRINK, Draw, Feature, kinds_of

_STEP = Train(step=True)
_STEP_OF_NEXT = Train(batch=1, step=True)
_SAVED = (_STEP, Save(), _STEP)


def _is_taken(case: Case, drain: str, *, weights: str = "all") -> list[bool]:
    exports = (action for action in case.program if isinstance(action, Export))
    return [export.drain == drain and export.weights == weights for export in exports]


def inferring_cases_with_adapter(_: Axes) -> SearchStrategy[Case]:
    return inferring_cases(Axes(adapter="lora"))


FEATURES_OF_DRAWS: dict[str, tuple[Draw, Feature]] = {
    "five actions": (stepping_cases, lambda c: len(c.program) >= 5),
    "a poison in the second sequence of the last rank": (
        poisoned_cases,
        lambda c: any(
            isinstance(action, Poison)
            and (action.rank, action.sequence) == (c.mesh.world_size - 1, 1)
            and action.value == "inf"
            for action in c.program
        ),
    ),
    "an interrupt in backward of a later micro-batch": (
        interrupted_cases,
        lambda c: any(
            isinstance(action, Interrupt) and action.phase == "backward" and action.micro_batch > 0
            for action in c.program
        ),
    ),
    "two interrupts": (interrupted_cases, lambda c: kinds_of(c).count("interrupt") == 2),
    "an interrupt between steps": (
        interrupted_cases,
        lambda c: (
            kinds_of(c)[:3] == ["train", "interrupt", "train"] and c.program[2] == _STEP_OF_NEXT
        ),
    ),
    "an eval between train actions": (
        inferring_cases,
        lambda c: kinds_of(c)[:3] == ["train", "eval", "train"],
    ),
    "an export between train actions": (
        inferring_cases,
        lambda c: kinds_of(c)[:3] == ["train", "export", "train"],
    ),
    "frozen and unfrozen": (
        freezing_cases,
        lambda c: kinds_of(c)[:4] == ["freeze", "train", "unfreeze", "train"],
    ),
    "half of the parameters frozen": (
        freezing_cases,
        lambda c: Freeze(part="half") in c.program,
    ),
    "a restore behind an infer": (
        restoring_cases,
        lambda c: kinds_of(c)[:3] == ["train", "infer", "restore"],
    ),
    "an inference behind a restore": (
        restoring_cases,
        lambda c: "infer" in kinds_of(c)[kinds_of(c).index("restore") :],
    ),
    "the second of two checkpoints, in a new trainee": (
        resuming_cases,
        lambda c: (
            kinds_of(c).count("save") == 2
            and any(isinstance(action, Load) and action.fresh for action in c.program)
        ),
    ),
    "one checkpoint kept": (
        resuming_cases,
        lambda c: any(isinstance(action, Save) and action.max_to_keep == 1 for action in c.program),
    ),
    "a resume by the other strategy in a column": (
        resharding_cases,
        lambda c: any(
            isinstance(action, Load) and (action.strategy, action.shape) == ("fsdp1", (2, 1))
            for action in c.program
        ),
    ),
    "every damage in one program": (
        rejecting_cases,
        lambda c: len({a.damage for a in c.program if isinstance(a, Reject)}) == 4,
    ),
    "a consumer that raises": (exporting_cases, lambda c: any(_is_taken(c, "raise"))),
    "an export held over a step": (
        exporting_cases,
        lambda c: any(_is_taken(c, "hold")) and kinds_of(c)[:3] == ["export", "train", "resume"],
    ),
    "an export over another one": (
        exporting_cases,
        lambda c: any(_is_taken(c, "hold")) and kinds_of(c)[:3] == ["export", "export", "resume"],
    ),
    "a base that is held": (adapted_cases, lambda c: any(_is_taken(c, "hold", weights="base"))),
    "an adapter in its units": (
        adapted_cases,
        lambda c: Export(weights="adapter", layered=True) in c.program,
    ),
    "phases after a step": (
        syncing_cases,
        lambda c: kinds_of(c)[:4] == ["train", "export", "export", "export"],
    ),
    "inference with a merged adapter after a step": (
        switching_cases,
        lambda c: c.program[0] == _STEP and Infer(adapter="merged") in c.program[1:],
    ),
    "inference without an adapter between train actions": (
        inferring_cases_with_adapter,
        lambda c: any(isinstance(a, Infer) and a.adapter == "off" for a in c.program),
    ),
    "groups of three": (grouped_cases, lambda c: c.engine.planning.group == 3),
}


@pytest.mark.parametrize(("draw", "feature"), FEATURES_OF_DRAWS.values(), ids=FEATURES_OF_DRAWS)
def test_every_feature_of_a_draw_is_reached(draw: Draw, feature: Feature) -> None:
    assert feature(find(draw(Axes()), feature, settings=SEARCH))


def test_frozen_models_are_unfrozen() -> None:
    def feature(case: Case) -> bool:
        return Unfreeze(part="biases") in case.program and case.model.frozen == "biases"

    assert feature(find(freezing_cases(Axes(kind="frozen")), feature, settings=SEARCH))


def test_groups_are_planned_by_tokens() -> None:
    row = Axes(planning="token_budget")
    found = find(grouped_cases(row), lambda c: len(c.batches) == 2, settings=SEARCH)
    assert found.engine.planning.group > 1


def test_batches_planned_by_tokens_are_interrupted_late() -> None:
    def feature(case: Case) -> bool:
        return any(isinstance(a, Interrupt) and a.micro_batch > 0 for a in case.program)

    row = Axes(planning="token_budget")
    assert feature(find(interrupted_cases(row), feature, settings=SEARCH))


@pytest.mark.parametrize(
    ("draw", "program"),
    [
        (poisoned_cases, (Poison(), _STEP_OF_NEXT)),
        (interrupted_cases, (Interrupt(phase="backward"), Train(batch=1))),
        (inferring_cases, (Infer(), Train())),
        (freezing_cases, (Freeze(), _STEP)),
        (restoring_cases, (_STEP, Restore(), Train(batch=1))),
        (resuming_cases, (*_SAVED, Load(), _STEP)),
        (resharding_cases, (*_SAVED, Load(fresh=True, strategy="fsdp2", shape=(2,)), _STEP)),
        (saving_cases, (*_SAVED, Save(), _STEP)),
        (rejecting_cases, (*_SAVED, Reject(damage="flipped", file=1), _STEP)),
        (grouped_cases, (Train(),)),
        (unused_cases, (_STEP, _STEP_OF_NEXT)),
        (exporting_cases, (Export(),)),
        (syncing_cases, (*(Export(weights=w) for w in ("merged", "base", "adapter")), Export())),
        (
            switching_cases,
            (
                Export(weights="merged"),
                Infer(adapter="merged"),
                Infer(adapter="off"),
                Train(),
            ),
        ),
    ],
)
def test_a_kind_of_program_shrinks_to_the_shortest(draw: Draw, program: Program) -> None:
    found = find(draw(Axes()), lambda _: True, settings=SHRINK)
    assert found.program == program
    size = found.engine.planning.group * (2 if draw in (interrupted_cases, grouped_cases) else 1)
    assert [len(local) for local in found.batches[0].ranks] == [size] * 2


@pytest.mark.parametrize(
    ("draw", "feature", "kinds"),
    [
        (
            interrupted_cases,
            lambda c: any(isinstance(a, Interrupt) and a.phase == "forward" for a in c.program),
            ["interrupt", "train"],
        ),
        (freezing_cases, lambda c: "unfreeze" in kinds_of(c), ["freeze", "unfreeze", "train"]),
        (
            restoring_cases,
            lambda c: "infer" in kinds_of(c)[: kinds_of(c).index("restore")],
            ["train", "infer", "restore", "train"],
        ),
        (inferring_cases, lambda c: "eval" in kinds_of(c), ["eval", "train"]),
    ],
)
def test_a_feature_of_a_program_shrinks_alone(
    draw: Draw, feature: Feature, kinds: list[str]
) -> None:
    found = find(draw(Axes()), feature, settings=SHRINK)
    assert sorted(kinds_of(found)) == sorted(kinds)


@given(case=any_cases())
def test_training_follows_what_must_not_change_it(case: Case) -> None:
    """What an interrupt, a poison, a freeze or a restore left shows in the action behind it.

    Restored weights show in an export too.
    """
    kinds = kinds_of(case)
    if {"poison", "interrupt", "freeze", "unfreeze"} & set(kinds):
        assert kinds[-1] == "train"
    elif "restore" in kinds:
        assert kinds[-1] in ("train", "export")


@given(case=unused_cases(Axes(kind="optional_parameter")))
def test_unused_cases_have_a_batch_without_the_part(case: Case) -> None:
    assert any(not any(s.gated for s in batch.sequences) for batch in case.batches)
    assert (case.optimizer.kind, case.optimizer.weight_decay > 0) == ("adamw", True)

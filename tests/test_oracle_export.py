"""What an export must yield, and that a wrong name, value or side effect is found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from fsdp_engine.contract.actions import Export, Resume, Train
from fsdp_engine.contract.case import Case
from fsdp_engine.contract.errors import UnsupportedCase
from fsdp_engine.contract.model import Model
from fsdp_engine.contract.observation import (
    Array,
    ExportedTensor,
    ExportRecord,
    LocalArray,
    Observation,
    Record,
    TrainRecord,
)
from fsdp_engine.workload.models import build_model
from oracles.arrays import array_of, tensor_of
from oracles.export import predict_initial, predict_trained
from properties.checks import export
from tests.observed import Answers, everywhere, observed, showing, spoilt, worked_case

MODEL = Model(family="embedding", units=2, tied=True, buffers=True)
CASE = worked_case(model=MODEL, dtypes="bf16/bf16/fp32", program=(Export(), Train(), Export()))


def test_names_are_those_of_the_state_dict() -> None:
    wanted = predict_initial(CASE)
    names = ["embed.weight", "head.weight", "layers.0.scale", "layers.1.up.weight", "revision"]
    assert set(names) <= set(wanted.tensors)
    assert wanted.dtype("embed.weight") == "bfloat16"
    assert wanted.dtype("layers.0.scale") == "float32"
    assert wanted.dtype("revision") == "int64"
    assert wanted.shape("head.weight") == (4, 4)


def test_both_names_of_a_tied_pair_have_the_trained_value() -> None:
    trained = {
        name: torch.full_like(parameter, 2.0).detach()
        for name, parameter in build_model(CASE).named_parameters()
    }
    wanted = predict_trained(CASE, trained)
    assert set(wanted.tensors) == set(predict_initial(CASE).tensors)
    assert torch.equal(wanted.tensors["head.weight"], wanted.tensors["embed.weight"])
    assert torch.equal(
        wanted.tensors["layers.1.scale"], predict_initial(CASE).tensors["layers.1.scale"]
    )


def test_what_is_predicted_passes() -> None:
    run = showing(observed(CASE))
    assert export.match_oracle(CASE, run).passed
    assert export.staged_equals_unstaged(CASE, Answers()).passed
    assert export.changes_nothing(CASE, Answers()).passed


Edit = Callable[[list[ExportedTensor]], list[ExportedTensor]]


def yielding(edit: Edit) -> Callable[[Record], Record]:
    def change(record: Record) -> Record:
        assert isinstance(record, ExportRecord)
        return dataclasses.replace(record, tensors=tuple(edit(list(record.tensors))))

    return change


def flipped(array: Array) -> Array:
    """The same with the lowest bit of the first element flipped."""
    return dataclasses.replace(array, data=bytes([array.data[0] ^ 1]) + array.data[1:])


def weight(**changes: object) -> Edit:
    """Change the embedding's weight."""

    def edit(tensors: list[ExportedTensor]) -> list[ExportedTensor]:
        tensors[PLACE] = dataclasses.replace(tensors[PLACE], **changes)  # type: ignore[arg-type]  # fields by name
        return tensors

    return edit


FIRST = observed(CASE).ranks[0].records[0]
assert isinstance(FIRST, ExportRecord)
NAME = "embed.weight"
PLACE = [tensor.name for tensor in FIRST.tensors].index(NAME)
VALUE = FIRST.tensors[PLACE].value
WIDENED = array_of(tensor_of(VALUE).float())
ROW = array_of(tensor_of(VALUE)[:1])


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (weight(value=flipped(VALUE)), f"{NAME}[0, 0]: got "),
        (weight(value=WIDENED), f"{NAME} dtype: got float32, should be bfloat16"),
        (weight(value=ROW), f"{NAME} shape: got (1, 4), should be (4, 4)"),
        (weight(device="meta"), f"{NAME} device: got meta, should be cpu"),
        (weight(name=f"_fsdp_wrapped_module.{NAME}"), f"{NAME}: got 0 times, should be once"),
        (
            lambda tensors: tensors[:PLACE] + tensors[PLACE + 1 :],
            f"{NAME}: got 0 times, should be once",
        ),
        (lambda tensors: [*tensors, tensors[PLACE]], f"{NAME}: got 2 times, should be once"),
        (
            lambda tensors: [*tensors, dataclasses.replace(tensors[0], name="more")],
            "more: got exported, should be no such name",
        ),
        (lambda tensors: tensors[::-1], "should be revision as on rank 0"),
    ],
)
def test_a_wrong_export_is_found(edit: Edit, sentence: str) -> None:
    run = showing(spoilt(observed(CASE), 1, 2, yielding(edit)))
    verdict = export.match_oracle(CASE, run)
    assert verdict.outcome == "fail"
    assert any(
        "action 2 (export) rank 1" in mismatch.where and sentence in str(mismatch)
        for mismatch in verdict.mismatches
    )


STEPPED = worked_case(model=MODEL, program=(Train(step=True), Export()))


def doubled(part: LocalArray) -> LocalArray:
    assert part.data is not None
    return dataclasses.replace(part, data=array_of(tensor_of(part.data) * 2))


def updated(record: Record) -> Record:
    assert isinstance(record, TrainRecord)
    return dataclasses.replace(record, parameters=tuple(map(doubled, record.parameters)))


def test_an_export_of_the_weights_before_the_step_is_found() -> None:
    assert export.match_oracle(STEPPED, showing(observed(STEPPED))).passed
    verdict = export.match_oracle(STEPPED, showing(everywhere(observed(STEPPED), 0, updated)))
    assert "action 1 (export) rank 0 embed.weight" in verdict.mismatches[0].where


def test_staging_that_changes_a_value_is_found() -> None:
    def observe(case: Case) -> Observation:
        if Export(staging="force") in case.program:
            return everywhere(observed(case), 0, yielding(weight(value=flipped(VALUE))))
        return observed(case)

    verdict = export.staged_equals_unstaged(CASE, Answers(observe=observe))
    assert verdict.mismatches[0].where.startswith("action 0 (export) rank 0 staging force not auto")


def test_with_one_way_of_staging_there_is_nothing_to_compare() -> None:
    def observe(case: Case) -> Observation:
        if Export() in case.program:
            return observed(case)
        raise UnsupportedCase("no staging")

    verdict = export.staged_equals_unstaged(CASE, Answers(observe=observe))
    assert verdict.outcome == "not_applicable"


def left_behind(**changes: object) -> Callable[[Record], Record]:
    def change(record: Record) -> Record:
        assert isinstance(record, ExportRecord)
        after = dataclasses.replace(record.after, **changes)  # type: ignore[arg-type]  # fields by name
        return dataclasses.replace(record, after=after)

    return change


@pytest.mark.parametrize(
    "changes",
    [
        {"training": True},
        {"requires_grad": {NAME: False}},
        {"devices": {NAME: "meta"}},
        {"parameters": tuple(map(doubled, FIRST.after.parameters))},
        {"parameters": FIRST.after.parameters[1:]},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_side_effect_is_found(changes: dict[str, object]) -> None:
    run = showing(spoilt(observed(CASE), 1, 0, left_behind(**changes)))
    export_only = dataclasses.replace(CASE, program=(Export(),))
    assert export.changes_nothing(export_only, run).outcome == "fail"


def test_training_that_an_export_changed_is_found() -> None:
    def louder(record: Record) -> Record:
        assert isinstance(record, TrainRecord)
        return dataclasses.replace(record, total_loss=2.0)

    def observe(case: Case) -> Observation:
        exports = case.program[0] == Export()
        return everywhere(observed(case), 1, louder) if exports else observed(case)

    verdict = export.changes_nothing(CASE, Answers(observe=observe))
    assert str(verdict.mismatches[0]) == (
        "action 1 (train) rank 0, exports against none total_loss: got 2.0, should be 1.0"
    )


def test_programs_without_exports_are_not_judged() -> None:
    for check in (export.match_oracle, export.staged_equals_unstaged, export.changes_nothing):
        assert check(worked_case(), Answers()).outcome == "not_applicable"


HELD = worked_case(
    model=MODEL,
    program=(
        Export(drain="close", after=2),
        Export(drain="hold", after=3),
        Train(step=True),
        Export(),
        Resume(),
    ),
)


def rest(**changes: object) -> Callable[[Record], Record]:
    def change(record: Record) -> Record:
        assert isinstance(record, ExportRecord)
        return dataclasses.replace(record, **changes)  # type: ignore[arg-type]  # fields by name

    return change


def test_an_export_goes_on_after_a_step_with_its_own_values_or_is_refused() -> None:
    assert export.match_oracle(HELD, showing(observed(HELD))).passed
    refused = everywhere(observed(HELD), 4, rest(tensors=(), raised="EngineStateError"))
    assert export.match_oracle(HELD, showing(refused)).passed


@pytest.mark.parametrize(
    ("action", "change", "sentence"),
    [
        (0, rest(tensors=()), "number of tensors: got 0, should be 2"),
        (0, rest(raised="EngineStateError"), "raised: got 'EngineStateError', should be ''"),
        (3, rest(tensors=(), raised="EngineStateError"), "raised: got 'EngineStateError'"),
        (4, rest(tensors=()), "head.weight: got 0 times, should be once"),
        (4, rest(raised="RuntimeError"), "raised: got 'RuntimeError', should be ''"),
        (4, rest(tensors=FIRST.tensors), "embed.weight: got 2 times, should be once"),
        (
            4,
            yielding(lambda t: [dataclasses.replace(x, value=ROW) for x in t]),
            "dtype: got bfloat16, should be float32",
        ),
    ],
)
def test_a_wrong_part_of_an_export_is_found(
    action: int, change: Callable[[Record], Record], sentence: str
) -> None:
    verdict = export.match_oracle(HELD, showing(everywhere(observed(HELD), action, change)))
    assert verdict.outcome == "fail"
    found = [str(m) for m in verdict.mismatches if f"action {action} " in m.where]
    assert any(sentence in mismatch for mismatch in found), found


def test_an_export_is_not_refused_without_a_write() -> None:
    case = worked_case(model=MODEL, program=(Export(drain="hold", after=1), Train(), Resume()))
    assert export.match_oracle(case, showing(observed(case))).passed
    refused = everywhere(observed(case), 2, rest(tensors=(), raised="EngineStateError"))
    assert export.match_oracle(case, showing(refused)).outcome == "fail"

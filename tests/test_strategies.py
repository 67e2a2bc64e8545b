"""The generators reach every feature they are there for, and shrink to the simplest case."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import find, given

from fsdp_engine.contract.actions import Infer, Train
from fsdp_engine.contract.batch import Batch, Sequence
from fsdp_engine.contract.case import Case
from properties.covering import Axes
from properties.strategies.cases import (
    any_cases,
    cases,
    exact_cases,
    exporting_cases,
    stepping_cases,
)
from properties.strategies.tables import one_case
from tests.drawing import SEARCH, SHRINK, Feature, kinds_of


def _totals(batch: Batch) -> list[int]:
    return [sum(sequence.loss_tokens for sequence in local) for local in batch.ranks]


def _gates(case: Case) -> list[bool]:
    """Whether each micro-batch of rank 0 uses the optional part."""
    planning = case.engine.planning
    size = planning.sequences if planning.kind == "static" else 1
    local = case.batches[0].ranks[0]
    return [any(s.gated for s in local[at : at + size]) for at in range(0, len(local), size)]


def _gated(sequences: tuple[Sequence, ...]) -> bool:
    return any(sequence.gated for sequence in sequences)


FEATURES: dict[str, Feature] = {
    "a width smaller than the shard group": lambda c: c.model.width < c.mesh.shards,
    "a width the shard group does not divide": lambda c: c.model.width % c.mesh.shards != 0,
    "a vocabulary smaller than the shard group": lambda c: c.model.vocab < c.mesh.shards,
    "three units": lambda c: c.model.units == 3,
    "biases": lambda c: c.model.bias,
    "a sequence without loss tokens": lambda c: any(
        s.loss_tokens == 0 for s in c.batches[0].sequences
    ),
    "a rank without loss tokens": lambda c: 0 in _totals(c.batches[0]),
    "four micro-batches": lambda c: len(_gates(c)) == 4,
    "fewer sequences on a rank than on another": lambda c: (
        len({len(local) for local in c.batches[0].ranks}) > 1
    ),
    "a budget that splits": lambda c: (
        c.engine.planning.kind == "token_budget"
        and sum(s.length for s in c.batches[0].ranks[0]) > c.engine.planning.max_tokens
    ),
    "two batches": lambda c: len(c.batches) == 2,
    "an infer between train actions": lambda c: any(
        isinstance(action, Infer) for action in c.program[1:-1]
    ),
    "a step, then another batch": lambda c: (
        c.program[:2] == (Train(step=True), Train(batch=1, step=True))
    ),
    "an export after a step": lambda c: (
        [action.kind for action in c.program[-2:]] == ["train", "export"]
    ),
    "sequence means": lambda c: c.engine.loss_mode == "seq-mean-token-mean",
    "a legacy configuration": lambda c: c.engine.config_source == "legacy",
    "AdamW with decay": lambda c: c.optimizer.kind == "adamw" and c.optimizer.weight_decay > 0,
    "a cosine behind a warmup": lambda c: (
        c.optimizer.schedule == "cosine" and c.optimizer.warmup_steps > 0
    ),
    "SGD without decay": lambda c: (
        kinds_of(c).count("train") > 1
        and (c.optimizer.kind, c.optimizer.weight_decay) == ("sgd", 0.0)
        and c.optimizer.clip_grad > 1
    ),
    "a poison": lambda c: "poison" in kinds_of(c),
    "an interrupt": lambda c: "interrupt" in kinds_of(c),
    "an eval": lambda c: "eval" in kinds_of(c),
    "an unfreeze": lambda c: "unfreeze" in kinds_of(c),
    "a restore": lambda c: "restore" in kinds_of(c),
    "groups": lambda c: c.engine.planning.group > 1,
    "a world of one": lambda c: c.mesh.world_size == 1,
    "a world of four in a column": lambda c: c.mesh.shape == (4, 1),
}

FEATURES_OF_ROWS: dict[str, tuple[Axes, Feature]] = {
    "frozen biases": (Axes(kind="frozen"), lambda c: c.model.frozen == "biases"),
    "a frozen first unit": (Axes(kind="frozen"), lambda c: c.model.frozen == "first_unit"),
    "buffers and an optional unit": (
        Axes(kind="optional_unit"),
        lambda c: c.model.buffers and c.model.optional == "unit",
    ),
    "a tied language model": (Axes(kind="tied"), lambda c: c.model.is_language and c.model.tied),
    "the part unused in the last micro-batch": (
        Axes(kind="optional_unit"),
        lambda c: _gates(c) == [True, True, False],
    ),
    "the part used in the last micro-batch alone": (
        Axes(kind="optional_parameter"),
        lambda c: _gates(c) == [False, False, True],
    ),
    "the part never used": (Axes(kind="optional_parameter"), lambda c: not any(_gates(c))),
    "gated and other sequences in one micro-batch": (
        Axes(kind="optional_unit"),
        lambda c: (
            c.engine.planning.kind == "static"
            and c.engine.planning.sequences == 2
            and [s.gated for s in c.batches[0].ranks[0]][:2] == [True, False]
        ),
    ),
    "a parameter that some ranks use": (
        Axes(kind="optional_parameter"),
        lambda c: c.model.optional == "parameter" and len(set(map(_gated, c.batches[0].ranks))) > 1,
    ),
    "one of two parameters on each rank": (
        Axes(kind="optional_parameter"),
        lambda c: (
            c.model.optional == "either"
            and [{s.gated for s in rank} for rank in c.batches[0].ranks] == [{True}, {False}]
        ),
    ),
    "an adapter on all layers of a tied model": (
        Axes(adapter="lora", kind="tied"),
        lambda c: c.model.lora_targets == "all",
    ),
    "an adapter scaled by zero": (Axes(adapter="lora"), lambda c: c.model.lora_alpha == 0),
    "an adapter of rank one on the root": (
        Axes(adapter="lora"),
        lambda c: c.model.lora_rank == 1 and c.model.lora_targets == "root",
    ),
    "an adapter with three units": (
        Axes(adapter="lora"),
        lambda c: c.model.lora_rank > 0 and c.model.units == 3,
    ),
}


@pytest.mark.parametrize("feature", FEATURES.values(), ids=FEATURES)
def test_every_feature_is_reached(feature: Feature) -> None:
    assert feature(find(any_cases(), feature, settings=SEARCH))


@pytest.mark.parametrize(("row", "feature"), FEATURES_OF_ROWS.values(), ids=FEATURES_OF_ROWS)
def test_every_feature_of_a_row_is_reached(row: Axes, feature: Feature) -> None:
    assert feature(find(cases(row), feature, settings=SEARCH))


def test_exact_cases_have_parts() -> None:
    row = Axes(kind="optional_parameter")
    assert find(exact_cases(row), lambda c: c.exact, settings=SEARCH).model.optional == "parameter"


@pytest.mark.parametrize("size", range(5, 9))
def test_wide_worlds_are_reached_where_allowed(size: int) -> None:
    wanted = find(any_cases(max_world_size=8), lambda c: c.mesh.world_size == size, settings=SEARCH)
    assert wanted.mesh.world_size == size


@pytest.mark.parametrize("draw", [cases, stepping_cases, exact_cases], ids=lambda d: d.__name__)
def test_a_row_shrinks_to_the_simplest_case(draw: Callable[[Axes], object]) -> None:
    found = find(draw(Axes()), lambda _: True, settings=SHRINK)  # type: ignore[arg-type]
    (simplest,) = one_case()
    assert isinstance(found, Case)
    assert found.model == simplest.model
    assert found.engine == simplest.engine
    assert found.optimizer == simplest.optimizer
    assert len(found.program) == 1
    assert found.seed == 0
    assert _totals(found.batches[0]) == ([1, 2] if draw is not exact_cases else [2, 2])


def test_the_whole_space_shrinks_to_the_simplest_case() -> None:
    assert find(any_cases(), lambda _: True, settings=SHRINK) == one_case()[0]


@pytest.mark.parametrize(
    ("feature", "wanted"),
    [
        (lambda c: c.model.tied, {"family": "embedding", "units": 1, "tied": True}),
        (lambda c: c.model.units >= 3, {"family": "linear", "units": 3}),
        (lambda c: c.model.lora_rank > 0, {"family": "linear", "lora_rank": 2}),
    ],
    ids=["tied", "units", "lora"],
)
def test_a_feature_shrinks_alone(feature: Feature, wanted: dict[str, object]) -> None:
    found = find(any_cases(), feature, settings=SHRINK)
    assert {name: getattr(found.model, name) for name in wanted} == wanted
    assert found.mesh.world_size == 2
    assert len(found.batches[0].sequences) == 2
    assert found.dtypes == Case(batches=found.batches).dtypes


@given(case=any_cases(max_world_size=8))
def test_no_wrong_reduction_can_hide(case: Case) -> None:
    """Ranks differ in loss tokens, micro-batches of a rank too, and sequences are all different."""
    for batch in case.batches:
        keys = [sequence.key for sequence in batch.sequences]
        assert len(set(keys)) == len(keys)
        assert batch.loss_tokens > 0
        if case.exact:
            continue  # normalisers are powers of two instead
        totals = _totals(batch)
        assert len(set(totals)) == len(totals)
        if case.engine.planning.kind == "static":
            for local in batch.ranks:
                assert _parts_differ(local, case.engine.planning.sequences)


def _parts_differ(local: tuple[Sequence, ...], size: int) -> bool:
    parts = [local[at : at + size] for at in range(0, len(local), size)]
    counts = [sum(sequence.loss_tokens for sequence in part) for part in parts]
    return len(set(counts)) == len(counts)


@given(case=any_cases())
def test_a_unit_runs_on_all_ranks_or_on_none(case: Case) -> None:
    if case.model.optional != "unit" or case.engine.planning.kind != "static":
        return
    size = case.engine.planning.sequences
    for batch in case.batches:
        used = {
            tuple(
                any(sequence.gated for sequence in local[at : at + size])
                for at in range(0, len(local), size)
            )
            for local in batch.ranks
        }
        assert len(used) == 1


@given(case=exact_cases(Axes(mesh="line3", kind="mlp")))
def test_normalisers_of_exact_cases_are_powers_of_two(case: Case) -> None:
    for batch in case.batches:
        bearing = [s.loss_tokens for s in batch.sequences if s.loss_tokens]
        mode = case.engine.loss_mode
        if mode == "token-mean":
            assert _is_power(batch.loss_tokens)
        if mode.startswith("seq-mean"):
            assert _is_power(len(bearing))
        if mode == "seq-mean-token-mean":
            assert all(map(_is_power, bearing))


def _is_power(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


@given(case=exporting_cases(Axes()))
def test_exporting_cases_export(case: Case) -> None:
    assert any(action.kind == "export" for action in case.program)

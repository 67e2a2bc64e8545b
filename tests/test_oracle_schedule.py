"""The collectives of the worked example, counted and in order, and that a wrong one is found."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable

import pytest

from fsdp_engine.contract.actions import Export, Infer, Train
from fsdp_engine.contract.case import Case, Strategy
from fsdp_engine.contract.model import Model
from fsdp_engine.contract.observation import Collective, Observation, Record, TrainRecord
from fsdp_engine.contract.protocol import EAGER_FALLBACK
from oracles.schedule import predict_schedule
from oracles.verdict import Verdict
from properties.checks import communication
from tests.observed import everywhere, numerics_of, observed, showing, spoilt, worked_case

SHORT = {"all_gather": "AG", "reduce_scatter": "RS", "all_reduce": "AR"}
UNITS = 2


def schedule(case: Case) -> tuple[Collective, ...]:
    gated = (True,) * len(case.batches[0].ranks[0])
    numerics = numerics_of(case)
    return predict_schedule(case, numerics, gated, deferred=case.engine.deferred).collectives


def told(collectives: tuple[Collective, ...], phase: str) -> list[str]:
    return [
        f"{SHORT[c.operation]} {c.elements} {c.dtype.replace('float', 'f')}"
        for c in collectives
        if c.phase == phase
    ]


def test_fsdp2_zero3_in_order() -> None:
    collectives = schedule(worked_case(micro_batches=1))
    assert told(collectives, "forward") == ["AG 1054 bf16", "AG 212 bf16", "AG 212 bf16"]
    assert told(collectives, "backward") == [
        "AG 212 bf16",
        "AG 212 bf16",
        "RS 212 f32",
        "RS 212 f32",
        "RS 1054 f32",
    ]


def test_fsdp1_zero3_in_order() -> None:
    collectives = schedule(worked_case(strategy="fsdp1", micro_batches=1, shape=(4,)))
    assert told(collectives, "forward") == ["AG 1040 bf16", "AG 216 bf16", "AG 216 bf16"]
    assert told(collectives, "backward") == [
        "AG 216 bf16",
        "AG 216 bf16",
        "RS 216 f32",
        "RS 216 f32",
        "RS 1040 f32",
    ]


def test_replicas_reduce_what_is_scattered() -> None:
    collectives = schedule(worked_case(shape=(2, 2), micro_batches=1))
    assert told(collectives, "backward")[2:] == [
        "RS 212 f32",
        "AR 106 f32",
        "RS 212 f32",
        "AR 106 f32",
        "RS 1054 f32",
        "AR 527 f32",
    ]


def test_a_unit_without_gradients_into_it_is_reduced_after_the_root() -> None:
    model = Model(family="mlp", units=2, width=8, hidden=12, vocab=61)
    collectives = schedule(worked_case(model=model, micro_batches=1))
    assert told(collectives, "backward")[2:] == ["RS 192 f32", "RS 496 f32", "RS 192 f32"]


M = 3
FORWARD, BACKWARD = M * (UNITS + 1), M * UNITS


@pytest.mark.parametrize(
    ("strategy", "reshard", "deferred", "shape", "counts"),
    [  # all-gathers forward and backward, reduce-scatters, all-reduces
        ("fsdp1", True, False, (2,), (FORWARD, BACKWARD, 9, 0)),
        ("fsdp1", True, True, (2,), (FORWARD, BACKWARD, 3, 0)),
        ("fsdp1", False, False, (2,), (FORWARD, 0, 9, 0)),
        ("fsdp1", False, True, (2,), (UNITS + 1, 0, 3, 0)),
        ("fsdp1", True, True, (2, 2), (FORWARD, BACKWARD, 3, 3)),
        ("fsdp1", True, False, (1, 2), (FORWARD, BACKWARD, 9, 9)),
        ("fsdp1", True, False, (1,), (0, 0, 0, 9)),
        ("fsdp2", True, False, (2,), (FORWARD, BACKWARD, 9, 0)),
        ("fsdp2", True, True, (2,), (FORWARD, BACKWARD, 3, 0)),
        ("fsdp2", False, False, (2,), (FORWARD, 0, 9, 0)),
        ("fsdp2", False, True, (2,), (FORWARD, 0, 3, 0)),
        ("fsdp2", False, True, (2, 2), (FORWARD, 0, 3, 3)),
        ("fsdp2", True, False, (1, 2), (FORWARD, BACKWARD, 9, 9)),
        ("fsdp2", True, False, (2, 1), (0, 0, 0, 9)),
        ("fsdp2", True, False, (1,), (0, 0, 0, 0)),
    ],
)
def test_counts(
    strategy: Strategy,
    reshard: bool,  # noqa: FBT001  a row of the table
    deferred: bool,  # noqa: FBT001
    shape: tuple[int, ...],
    counts: tuple[int, ...],
) -> None:
    case = worked_case(
        strategy=strategy, reshard=reshard, deferred=deferred, shape=shape, micro_batches=M
    )
    counted: Counter[tuple[str, str]] = Counter((c.operation, c.phase) for c in schedule(case))
    keys = ("all_gather", "forward"), ("all_gather", "backward")
    assert tuple(counted[key] for key in keys) == counts[:2]
    assert counted["reduce_scatter", "backward"] == counts[2]
    assert counted["all_reduce", "backward"] == counts[3]


CASES = [
    worked_case(strategy=strategy, shape=shape, reshard=reshard, deferred=deferred)
    for strategy in ("fsdp1", "fsdp2")
    for shape in ((2,), (2, 2), (1, 2))
    for reshard in (True, False)
    for deferred in (True, False)
]


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case.engine.strategy}-{case.mesh.shape}"
)
def test_what_is_predicted_passes(case: Case) -> None:
    run = showing(observed(case))
    assert communication.reduces_every_unit(case, run).passed
    assert communication.same_in_every_group(case, run).passed
    assert communication.matches_schedule(case, run).passed


Edit = Callable[[list[Collective]], list[Collective]]


def edited(edit: Edit) -> Callable[[Record], Record]:
    def change(record: Record) -> Record:
        assert isinstance(record, TrainRecord)
        return dataclasses.replace(record, collectives=tuple(edit(list(record.collectives))))

    return change


def last_reduction(**changes: object) -> Edit:
    """Change the root's reduce-scatter, the last one of the list."""

    def edit(collectives: list[Collective]) -> list[Collective]:
        index = max(i for i, c in enumerate(collectives) if c.operation == "reduce_scatter")
        collectives[index] = dataclasses.replace(collectives[index], **changes)  # type: ignore[arg-type]  # fields by name
        return collectives

    return edit


def without_all_reduces(collectives: list[Collective]) -> list[Collective]:
    return [c for c in collectives if c.operation != "all_reduce"]


def reduced_twice(collectives: list[Collective]) -> list[Collective]:
    return [*collectives, collectives[-1]]


HYBRID = worked_case(shape=(2, 2), deferred=True)


@pytest.mark.parametrize(
    "edit",
    [
        last_reduction(axis="replicate"),
        last_reduction(axis="world", group_size=4),
        last_reduction(operation="all_reduce"),
        last_reduction(dtype="bfloat16"),
        last_reduction(elements=100),
        last_reduction(phase="forward"),
        without_all_reduces,
        reduced_twice,
    ],
)
def test_every_engine_is_held_to_its_reductions(edit: Edit) -> None:
    run = showing(everywhere(observed(HYBRID), 0, edited(edit)))
    verdict = communication.reduces_every_unit(HYBRID, run)
    assert verdict.outcome == "fail"
    assert "rank 3" in " ".join(map(str, verdict.mismatches))


def test_eager_reductions_are_too_many_for_deferred_sync() -> None:
    eager = observed(worked_case(shape=(2, 2)))
    verdict = communication.reduces_every_unit(HYBRID, showing(eager))
    assert "got 6 times, should be 3" in str(verdict.mismatches[0])


def test_a_fall_back_to_eager_sync_counts_as_eager() -> None:
    def abandoned(record: Record) -> Record:
        """A deferred first micro-batch that reduced some unit and stopped, then all again."""
        assert isinstance(record, TrainRecord)
        later = [dataclasses.replace(c, micro_batch=c.micro_batch + 1) for c in record.collectives]
        attempt = [c for c in record.collectives if c.micro_batch == 0][:-1]
        return dataclasses.replace(
            record,
            collectives=(*attempt, *later),
            residency=(),
            notes=(f"{EAGER_FALLBACK}: a unit was not used",),
        )

    observation = everywhere(observed(worked_case(shape=(2, 2))), 0, abandoned)
    assert communication.reduces_every_unit(HYBRID, showing(observation)).passed
    assert communication.matches_schedule(HYBRID, showing(observation)).outcome == "not_applicable"


@pytest.mark.parametrize(
    "edit",
    [
        last_reduction(axis="replicate"),
        last_reduction(elements=1056),
        last_reduction(micro_batch=0),
        last_reduction(dtype="bfloat16"),
        lambda collectives: [*collectives[1:], collectives[0]],
        lambda collectives: collectives[1:],
        lambda collectives: [collectives[0], *collectives],
    ],
)
def test_the_exact_list_is_compared(edit: Edit) -> None:
    run = showing(spoilt(observed(HYBRID), 2, 0, edited(edit)))
    verdict = communication.matches_schedule(HYBRID, run)
    assert [m.where.split(",")[0] for m in verdict.mismatches] == ["action 0 (train) rank 2"]


def test_zero2_that_gathers_in_the_backward_is_found() -> None:
    zero2 = worked_case(reshard=False)
    verdict = communication.matches_schedule(zero2, showing(observed(worked_case())))
    assert "collective 3: got all_gather" in str(verdict.mismatches[0])


def in_group(edit: Edit) -> Verdict:
    observation: Observation = spoilt(observed(HYBRID), 3, 0, edited(edit))
    return communication.same_in_every_group(HYBRID, showing(observation))


def test_ranks_of_a_group_agree() -> None:
    mismatch = in_group(last_reduction(elements=1055)).mismatches[0]
    assert mismatch.where.startswith("action 0 (train) rank 3 against rank 2 on shard")
    mismatch = in_group(without_all_reduces).mismatches[0]
    assert mismatch.where.startswith("action 0 (train) rank 3 against rank 1 on replicate")


def test_units_may_be_gathered_after_an_inference() -> None:
    case = worked_case(program=(Infer(), Train()))
    first = len([c for c in schedule(case) if c.phase == "forward" and c.micro_batch == 0])
    observation = everywhere(observed(case), 1, edited(lambda collectives: collectives[first:]))
    assert communication.matches_schedule(case, showing(observation)).passed


def test_nothing_to_judge_without_training() -> None:
    case = worked_case(program=(Export(),))
    run = showing(observed(case))
    assert communication.reduces_every_unit(case, run).outcome == "not_applicable"
    assert communication.matches_schedule(case, run).outcome == "not_applicable"

"""The recorder on real ranks: which collectives, in which phase, and what is retained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from fsdp_engine.contract.actions import Export, Train
from fsdp_engine.contract.case import DTYPE_POLICIES, Strategy
from fsdp_engine.contract.observation import Collective, ExportRecord, TrainRecord
from fsdp_engine.world.pool import WorldPool
from tests.world_cases import ROOT_AND_TWO_UNITS, world_case

MICRO_BATCHES = 3
UNITS = 2  # without the root


@pytest.fixture(scope="module", params=["fsdp1", "fsdp2"])
def wrapper(request: pytest.FixtureRequest) -> Iterator[tuple[Strategy, WorldPool]]:
    with WorldPool(f"torch_{request.param}") as pool:
        yield request.param, pool


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("mesh", [(2,), (2, 2)])
def test_collectives_are_those_of_the_wrapper(
    wrapper: tuple[Strategy, WorldPool], mesh: tuple[int, ...], *, reshard: bool, deferred: bool
) -> None:
    strategy, pool = wrapper
    case = world_case(
        strategy,
        mesh=mesh,
        micro_batches=MICRO_BATCHES,
        reshard_after_forward=reshard,
        deferred=deferred,
        model=ROOT_AND_TWO_UNITS,
    )
    kept = strategy == "fsdp1" and deferred and not reshard  # parameters stay gathered
    synced = 1 if deferred else MICRO_BATCHES
    wanted = Counter(
        {
            ("all_gather", "shard", "forward"): (1 if kept else MICRO_BATCHES) * (UNITS + 1),
            ("all_gather", "shard", "backward"): MICRO_BATCHES * UNITS if reshard else 0,
            ("reduce_scatter", "shard", "backward"): synced * (UNITS + 1),
            ("all_reduce", "replicate", "backward"): synced * (UNITS + 1) if len(mesh) == 2 else 0,
        }
    )
    for rank in pool(case).ranks:
        record = rank.records[0]
        assert isinstance(record, TrainRecord)
        got = Counter(
            (c.operation, c.axis, c.phase)
            for c in record.collectives
            if c.phase in ("forward", "backward")
        )
        assert got == +wanted
        assert [c.micro_batch for c in record.collectives] == sorted(
            c.micro_batch for c in record.collectives
        )


@pytest.mark.parametrize(
    ("strategy", "dtypes", "shards", "sizes"),
    [
        ("fsdp1", "fp32/bf16/fp32", 2, {216, 1038}),
        ("fsdp1", "fp32/bf16/fp32", 4, {216, 1040}),
        ("fsdp1", "fp32", 2, {212, 1038}),
        ("fsdp2", "fp32/bf16/fp32", 2, {212, 1054}),
        ("fsdp2", "fp32", 4, {212, 1088}),
    ],
)
def test_elements_count_what_is_communicated_whole(
    strategy: Strategy, dtypes: str, shards: int, sizes: set[int]
) -> None:
    policy = DTYPE_POLICIES[dtypes]
    case = world_case(strategy, mesh=(shards,), model=ROOT_AND_TWO_UNITS, dtypes=policy)
    with WorldPool(f"torch_{strategy}") as pool:
        record = pool(case).ranks[0].records[0]
    for operation, dtype in (("all_gather", policy.compute), ("reduce_scatter", policy.reduce)):
        found = [c for c in record.collectives if c.operation == operation]
        assert {c.elements for c in found} == sizes
        assert {c.dtype for c in found} == {dtype}
        assert {c.group_size for c in found} == {shards}


# Bytes between deferred micro-batches at two shards, by dtype policy: FSDP1, FSDP2.
RETAINED = {
    "fp32": (5848, 5844),
    "fp32/bf16/fp32": (2940, 5844),
    "fp32/bf16/bf16": (2940, 2922),
    "bf16/bf16/fp32": (2940, 5844),
}


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("dtypes", list(RETAINED))
def test_deferred_sync_retains_unsharded_gradients(
    wrapper: tuple[Strategy, WorldPool], dtypes: str, *, reshard: bool
) -> None:
    strategy, pool = wrapper
    case = world_case(
        strategy,
        micro_batches=MICRO_BATCHES,
        deferred=True,
        reshard_after_forward=reshard,
        model=ROOT_AND_TWO_UNITS,
        dtypes=DTYPE_POLICIES[dtypes],
    )
    gradient_bytes = RETAINED[dtypes][0 if strategy == "fsdp1" else 1]
    parameter_bytes = gradient_bytes if strategy == "fsdp1" and not reshard else 0
    record = pool(case).ranks[0].records[0]
    assert isinstance(record, TrainRecord)
    after = [sample for sample in record.residency if sample.moment == "after_backward"]
    assert [sample.micro_batch for sample in after] == list(range(MICRO_BATCHES))
    for sample in after[:-1]:
        assert sample.retained_gradient_bytes == gradient_bytes
        assert sample.retained_parameter_bytes == parameter_bytes
    assert after[-1].retained_gradient_bytes == after[-1].retained_parameter_bytes == 0


def test_units_are_resharded_after_forward_except_the_root(
    wrapper: tuple[Strategy, WorldPool],
) -> None:
    strategy, pool = wrapper
    root = {"embed.weight", "head.weight", "head.bias"}
    for reshard in (True, False):
        case = world_case(strategy, reshard_after_forward=reshard, model=ROOT_AND_TWO_UNITS)
        observation = pool(case)
        record = observation.ranks[0].records[0]
        assert isinstance(record, TrainRecord)
        names = {array.name for array in observation.ranks[0].initial}
        for sample in record.residency:
            resident = (root if reshard else names) if sample.moment == "after_forward" else set()
            assert set(sample.unsharded) == resident
            assert sample.retained_gradient_bytes == 0


def test_every_way_to_communicate_is_seen() -> None:
    with WorldPool("tests.engines.misbehaving:Talkative") as pool:
        case = world_case(micro_batches=2, program=(Train(), Export()))
        train, export = pool(case).ranks[1].records
    agreements = [c for c in train.collectives if c.reduce_op == "min"]
    assert [(c.phase, c.micro_batch) for c in agreements] == [("other", 0), ("other", 1)]
    assert isinstance(export, ExportRecord)
    assert {c.phase for c in export.collectives} == {"export"}
    assert [_short(c) for c in export.collectives] == [
        ("all_reduce", "float32", 4, "max"),
        ("all_gather", "bfloat16", 10, ""),
        ("broadcast", "bfloat16", 5, ""),
        ("all_reduce", "bfloat16", 5, "sum"),
        ("all_gather", "bfloat16", 10, ""),
        ("reduce_scatter", "float32", 8, "avg"),
    ]


def test_planning_comes_before_the_first_forward() -> None:
    with WorldPool("torch_fsdp2") as pool:
        record = pool(world_case(program=(Train(step=True),))).ranks[0].records[0]
    assert [_short(c) for c in record.collectives if c.phase == "plan"] == [
        ("all_reduce", "int64", 2, "sum")
    ]
    assert {c.micro_batch for c in record.collectives if c.phase == "plan"} == {-1}
    assert [c.operation for c in record.collectives if c.phase == "step"] == ["all_reduce"]


def _short(collective: Collective) -> tuple[str, str, int, str]:
    return (
        collective.operation,
        collective.dtype,
        collective.elements,
        collective.reduce_op,
    )

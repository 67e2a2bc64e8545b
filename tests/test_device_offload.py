"""Copies, counted: what rests on the host goes to the device as often as it must and no more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from fsdp_engine.contract.actions import Export, Train
from fsdp_engine.contract.case import Case, Optimizer, Strategy
from fsdp_engine.contract.model import Model
from fsdp_engine.contract.observation import ExportRecord, Observation, TrainRecord
from fsdp_engine.workload.models import parameter_names
from fsdp_engine.world.pool import WorldPool
from oracles.transfers import crossings
from tests.small_cases import small_case
from tests.world_cases import skip_without_device

MODEL = Model(family="mlp", units=3, bias=True)
NUM_PARAMETERS = len(parameter_names(MODEL))
NUM_UNITS = 3 + 1
IN, OUT = "host_to_device", "device_to_host"


@pytest.fixture(scope="module")
def device() -> Iterator[WorldPool]:
    with WorldPool("reference", device="sim", case_timeout_s=60.0) as pool:
        skip_without_device(pool)
        yield pool


def _case(strategy: Strategy, **options: bool) -> Case:
    case = small_case(shape=(2,), model=MODEL, strategy=strategy)
    program = (Train(step=True), Train(step=True), Export(), Export(staging="force"))
    return replace(
        case,
        engine=replace(case.engine, **options),  # type: ignore[arg-type]
        optimizer=Optimizer(kind="adamw"),
        program=program,
    )


def _count(observation: Observation, action: int, phase: str, direction: str) -> tuple[int, int]:
    record = observation.ranks[0].records[action]
    assert isinstance(record, TrainRecord | ExportRecord)
    found = crossings(record.copies, phase, direction)
    return len(found), sum(copy.num_bytes for copy in found)


def test_an_export_that_is_not_staged_makes_no_round_trip(device: WorldPool) -> None:
    observation = device(_case("fsdp2", param_offload=True))
    count, num_bytes = _count(observation, 2, "export", IN)
    assert (count, _count(observation, 2, "export", OUT)[0]) == (NUM_PARAMETERS, 0)
    staged_in, staged_out = (_count(observation, 3, "export", way) for way in (IN, OUT))
    assert staged_in == staged_out == (NUM_PARAMETERS, num_bytes)


def test_fsdp1_is_staged_by_units(device: WorldPool) -> None:
    """One more each way: the bounds of the shards."""
    observation = device(_case("fsdp1", param_offload=True))
    for action in (2, 3):
        for way in (IN, OUT):
            assert _count(observation, action, "export", way)[0] == NUM_UNITS + 1


def test_an_export_from_the_device_copies_nothing(device: WorldPool) -> None:
    observation = device(_case("fsdp2"))
    for action in (2, 3):
        assert _count(observation, action, "export", IN) == (0, 0)
        assert _count(observation, action, "export", OUT) == (0, 0)


@pytest.mark.parametrize(("strategy", "parts"), [("fsdp2", NUM_PARAMETERS), ("fsdp1", NUM_UNITS)])
def test_a_batch_moves_the_model_in_and_out_once(
    device: WorldPool, strategy: Strategy, parts: int
) -> None:
    observation = device(_case(strategy, param_offload=True, optimizer_offload=True))
    for action in range(2):
        assert _count(observation, action, "enter", IN)[0] == parts
        assert _count(observation, action, "leave", OUT)[0] == parts
    assert _count(observation, 0, "step", IN)[0] == 0
    assert _count(observation, 1, "step", IN)[0] == _count(observation, 0, "step", OUT)[0] - 1

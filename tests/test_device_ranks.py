"""Ranks on the simulated device show what ranks on the host show, bit for bit, and more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from fsdp_engine.contract.actions import Export, Infer, Interrupt, Restore, Train
from fsdp_engine.contract.case import Case, Optimizer, Strategy
from fsdp_engine.contract.model import Model
from fsdp_engine.contract.observation import Observation, TrainRecord
from fsdp_engine.world.pool import WorldPool
from oracles.device_memory import trainings
from oracles.footprint import footprints
from oracles.metamorphic import first_difference, whole
from oracles.records import PASSES
from tests.small_cases import small_case
from tests.world_cases import skip_without_device

MLP = Model(family="mlp", units=2)
TIED = Model(family="embedding", units=2, tied=True)
QWEN2 = Model(family="qwen2", units=2, lora_rank=1)

STRATEGIES: tuple[Strategy, ...] = ("fsdp2", "fsdp1")


@pytest.fixture(scope="module")
def host() -> Iterator[WorldPool]:
    with WorldPool("reference") as pool:
        yield pool


@pytest.fixture(scope="module")
def device() -> Iterator[WorldPool]:
    with WorldPool("reference", device="sim", case_timeout_s=60.0) as pool:
        skip_without_device(pool)
        yield pool


@pytest.fixture(scope="module")
def offloaded(device: WorldPool) -> Iterator[WorldPool]:  # noqa: ARG001  skips without a device
    with WorldPool("tests.engines.offloaded:Offloaded", device="sim", case_timeout_s=60.0) as pool:
        yield pool


def _case(strategy: Strategy, shape: tuple[int, ...], model: Model, policy: str) -> Case:
    case = small_case(
        shape=shape, model=model, policy=policy, strategy=strategy, deferred=len(shape) == 1
    )
    program = (Train(step=True), Infer(), Export(), Interrupt(), Train(step=True), Export())
    return replace(case, program=program, optimizer=Optimizer(kind="adamw"))


def _differences(case: Case, here: Observation, there: Observation) -> list[str]:
    found = first_difference(whole(case), there, here, told="device against host")
    return [str(mismatch) for mismatch in found]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("shape", "setting"),
    [
        ((2,), (MLP, "fp32")),
        ((3,), (TIED, "fp32/bf16/fp32")),
        ((2, 2), (QWEN2, "bf16/bf16/fp32")),
        ((2, 1), (MLP, "fp64")),
    ],
)
def test_the_device_computes_what_the_host_does(
    host: WorldPool,
    device: WorldPool,
    strategy: Strategy,
    shape: tuple[int, ...],
    setting: tuple[Model, str],
) -> None:
    case = _case(strategy, shape, *setting)
    here, there = host(case), device(case)
    assert _differences(case, here, there) == []
    exported = {
        (tensor.device, tensor.name): tensor.value
        for rank in there.ranks
        for tensor in rank.records[2].tensors  # type: ignore[union-attr]  # an export
    }
    assert {where for where, _ in exported} == {"hpu:0"}
    assert [rank.device for rank in here.ranks] == ["cpu"] * len(here.ranks)


def test_the_same_case_holds_the_same_bytes_every_time(device: WorldPool) -> None:
    case = _case("fsdp2", (2,), QWEN2, "fp32/bf16/fp32")
    first = device(case)
    assert device(case) == first
    assert device.fresh(case) == first
    assert all(rank.built_bytes > 0 for rank in first.ranks)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("zero3", [True, False])
@pytest.mark.parametrize("deferred", [True, False])
@pytest.mark.parametrize(
    ("shape", "model", "policy"),
    [
        ((2,), replace(MLP, width=6, hidden=10, bias=True), "fp32"),
        ((3,), TIED, "fp32/bf16/fp32"),
        ((2, 2), Model(family="qwen2", units=2), "bf16/bf16/fp32"),
    ],
)
def test_peaks_are_met_to_the_byte(  # noqa: PLR0917  a row of the table
    device: WorldPool,
    strategy: Strategy,
    zero3: bool,  # noqa: FBT001
    deferred: bool,  # noqa: FBT001
    shape: tuple[int, ...],
    model: Model,
    policy: str,
) -> None:
    """But for two scalars, the loss of a micro-batch and of the one before."""
    case = small_case(shape=shape, model=model, policy=policy, strategy=strategy, deferred=deferred)
    engine = replace(case.engine, reshard_after_forward=zero3)
    optimizer = Optimizer(kind="adamw")
    case = replace(case, engine=engine, optimizer=optimizer, program=(Train(step=True), Train()))
    observation = device(case)
    beside = []
    for rank in observation.ranks:
        for training in trainings(case, observation.numerics, rank):
            passes = footprints(
                case,
                observation.numerics,
                batch=0,
                rank=rank.rank,
                plan=training.record.plan,
                first=training.first,
            )
            predicted = [most for found in passes for most in (found.forward, found.backward)]
            got = [sample.device_peak for sample in training.record.residency]
            beside += [g - p - training.resting for g, p in zip(got, predicted, strict=True)]
    assert all(0 <= difference <= 8 for difference in beside), beside


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_deferral_costs_the_gradients_that_wait(device: WorldPool, strategy: Strategy) -> None:
    """Between micro-batches: a gradient of every parameter in full instead of one of its shard."""
    eager = replace(_case(strategy, (2,), MLP, "fp32"), program=(Train(),))
    eager = replace(eager, engine=replace(eager.engine, deferred=False))
    deferred = replace(eager, engine=replace(eager.engine, deferred=True))
    held = [_after_first_backward(device(case)) for case in (eager, deferred)]
    shard = device(eager).ranks[0].built_bytes
    assert held[1] - held[0] == 2 * shard - shard


def _after_first_backward(observation: Observation) -> int:
    record = observation.ranks[0].records[0]
    assert isinstance(record, TrainRecord)
    sample = record.residency[1]
    assert (sample.moment, sample.micro_batch) == ("after_backward", 0)
    return sample.device_bytes


@pytest.mark.parametrize("schedule", [None, 0, 1, 2])
def test_parameters_on_the_host_are_copied_in_order(
    offloaded: WorldPool, host: WorldPool, schedule: int | None
) -> None:
    """FSDP2 with `CPUOffloadPolicy`: a copy in for every gather, a copy out for every reduction.

    The root, of one parameter as the two units are, stays gathered for its backward.
    """
    case = replace(_case("fsdp2", (2,), Model(units=2), "fp32"), program=(Train(),))
    case = replace(case, engine=replace(case.engine, deferred=False))
    there = offloaded(replace(case, schedule=schedule))
    assert _differences(case, host(case), there) == []
    for rank in there.ranks:
        record = rank.records[0]
        assert isinstance(record, TrainRecord)
        assert rank.races == ()
        assert (rank.built_bytes, record.device_bytes) == (0, (0, 0))
        crossing = Counter(
            (copy.phase, copy.direction) for copy in record.copies if copy.phase in PASSES
        )
        assert crossing["forward", "host_to_device"] == 3 * 2
        assert crossing["backward", "host_to_device"] == 2 * 2
        assert crossing["backward", "device_to_host"] == 3 * 2
        assert crossing["forward", "device_to_host"] == 0


def test_a_schedule_changes_nothing_on_the_host(host: WorldPool) -> None:
    case = replace(_case("fsdp2", (2,), MLP, "fp32"), program=(Train(step=True), Restore()))
    assert host(replace(case, schedule=3)) == host(case)

"""Bytes on the simulated device of a model of 21 million parameters: predicted beside measured."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from fsdp_engine.contract.actions import Train
from fsdp_engine.contract.case import Case, Strategy
from fsdp_engine.contract.errors import AcceleratorError
from fsdp_engine.contract.model import Model
from fsdp_engine.contract.observation import Observation, TrainRecord
from fsdp_engine.world.pool import WorldPool
from oracles.device_memory import behind_backward, model_bytes
from oracles.footprint import footprints
from oracles.memory import predict_held
from oracles.placement import Places, resting_places
from tests.bench.table import Line
from tests.bench.work import Effort
from tests.small_cases import small_case

MODEL = Model(family="mlp", units=8, width=1024, hidden=1280)
STRATEGIES: tuple[Strategy, ...] = ("fsdp2", "fsdp1")


_SETTINGS = (
    *itertools.product(STRATEGIES, (True, False), (False, True), (False,)),
    *itertools.product(STRATEGIES, (True,), (False,), (True,)),
)
"""Strategy, ZeRO-3, deferred sync, param_offload."""


def measure(effort: Effort) -> list[Line]:  # noqa: ARG001  bytes are the same in every round
    """Two ranks, two micro-batches: bytes after the build, between micro-batches and at most."""
    lines: list[Line] = []
    with WorldPool("reference", case_timeout_s=120.0, device="sim") as pool:
        for strategy, zero3, deferred, offload in _SETTINGS:
            case = small_case(shape=(2,), model=MODEL, strategy=strategy, deferred=deferred)
            engine = replace(case.engine, reshard_after_forward=zero3, param_offload=offload)
            case = replace(case, program=(Train(),), engine=engine)
            name = f"{strategy} {'ZeRO-3' if zero3 else 'ZeRO-2'} {_sync(case)}"
            name += " param_offload" if offload else ""
            try:
                lines += _lines(name, case, pool(case))
            except AcceleratorError as error:
                return [Line(part="device", name="bytes", value=None, unit="", note=str(error))]
    return lines


def _lines(name: str, case: Case, observation: Observation) -> Iterator[Line]:
    numerics, rank = observation.numerics, observation.ranks[0]
    resting = model_bytes(case, numerics, resting_places(case)[0])
    yield _line(f"{name}: at rest", rank.built_bytes, resting)
    record = rank.records[0]
    assert isinstance(record, TrainRecord)
    loaded = model_bytes(case, numerics, Places(model=False, buffers=False, optimizer=False))
    yield _line(f"{name}: in a batch", record.device_bytes[0], loaded)
    held = predict_held(case, numerics, (True, True), deferred=case.engine.deferred)
    waiting = loaded + behind_backward(case, numerics, held[1], last=False)
    yield _line(f"{name}: between micro-batches", record.residency[1].device_bytes, waiting)
    plan = record.plan
    passes = footprints(case, numerics, batch=0, rank=0, plan=plan, first=True)
    most = loaded + max(max(found.forward, found.backward) for found in passes)
    yield _line(f"{name}: at most", max(sample.device_peak for sample in record.residency), most)


def _line(name: str, got: int, predicted: int) -> Line:
    return Line(
        part="device",
        name=name,
        value=got / 1e6,
        unit="MB",
        target=f"{predicted / 1e6:.3f} MB",
        note=f"{got - predicted} bytes beside the prediction",
    )


def _sync(case: Case) -> str:
    return "deferred" if case.engine.deferred else "eager"

"""Small programs, and observations of them with one thing altered."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from fsdp_engine.contract.actions import (
    Action,
    Train,
)
from fsdp_engine.contract.case import Case, Optimizer
from fsdp_engine.contract.model import Model
from fsdp_engine.contract.observation import (
    LocalArray,
    Observation,
    Record,
    Replicate,
    StateRecord,
    TrainRecord,
)
from fsdp_engine.workload.models import build_model
from oracles.arrays import array_of, tensor_of
from tests.observed import everywhere, worked_case

STEP = Train(step=True)


def programmed(*program: Action, **model: Any) -> Case:
    case = worked_case(program=program, model=Model(units=2, **model), dtypes="fp32")
    return dataclasses.replace(case, optimizer=Optimizer(kind="adamw", weight_decay=0.0625))


def moved(parts: tuple[LocalArray, ...], name: str) -> tuple[LocalArray, ...]:
    """The parts with one element of one parameter changed."""

    def change(part: LocalArray) -> LocalArray:
        assert part.data is not None
        value = tensor_of(part.data)
        value.reshape(-1)[0] += 1.0
        return dataclasses.replace(part, data=array_of(value))

    return tuple(change(part) if part.name == name else part for part in parts)


def changed(**fields: Any) -> Callable[[Record], Record]:
    def change(record: Record) -> Record:
        return dataclasses.replace(record, **fields)

    return change


def moving(name: str) -> Callable[[Record], Record]:
    def change(record: Record) -> Record:
        assert isinstance(record, StateRecord | TrainRecord)
        return dataclasses.replace(record, parameters=moved(record.parameters, name))

    return change


def with_moments(case: Case, observation: Observation, index: int, value: float) -> Observation:
    """The observation with an optimizer state of this value in one record of every rank."""
    parts = tuple(
        LocalArray(
            name=name,
            full_shape=tuple(parameter.shape),
            placement=Replicate(),
            data=array_of(parameter.detach().new_full(parameter.shape, value)),
        )
        for name, parameter in build_model(case).named_parameters()
    )
    return everywhere(observation, index, changed(optimizer_state={"exp_avg": parts}))


def told(verdict: Any) -> list[str]:
    return [str(mismatch) for mismatch in verdict.mismatches]


NAME = "layers.0.linear.weight"

"""The smallest relative error of one gradient element that is found, per dtype policy.

The typical case is run once; then one element of what was observed, the one of median size, is
changed on every rank that holds it by a power of two of itself, up and down, and judged again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fsdp_engine.contract.case import DTYPE_POLICIES, Case
from fsdp_engine.contract.observation import LocalArray, Observation, RankObservation, TrainRecord
from fsdp_engine.contract.protocol import EngineTables
from fsdp_engine.workload.models import TORCH_DTYPES
from fsdp_engine.world.pool import WorldPool
from oracles.arrays import array_of, tensor_of
from tests.bench.bisection import smallest_found
from tests.bench.table import Line
from tests.bench.typical import ENGINE, main_check, typical_case
from tests.bench.work import Effort

SIZES = (2, 8)
"""Two ranks, where the sum is emulated bit for bit, and eight, where only the bound is left."""

WHOLE_TENSOR = 0.0829
"""The relative bound on a whole tensor that training frameworks have adopted for bf16."""

TARGETS = {(2, "fp32/bf16/fp32"): "about 1e-6", (8, "fp32/bf16/fp32"): "about 1e-6"}

Changed = Callable[[float], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One element: its parameter and its flat index in the part that `rank` holds."""

    rank: int
    name: str
    index: int


def measure(effort: Effort) -> list[Line]:  # noqa: ARG001  nothing is timed here
    """Three lines per policy and size: our check, `assert_close`, the bound on the tensor."""
    lines = []
    with WorldPool(ENGINE, case_timeout_s=120.0) as pool:
        for size in SIZES:
            for policy in DTYPE_POLICIES:
                case = typical_case(size, policy)
                lines += _compared(case, pool(case), name=f"{policy}, {size} ranks")
                target = TARGETS.get((size, policy), "")
                lines[-3] = replace(lines[-3], target=target)
    return lines


def _compared(case: Case, observation: Observation, *, name: str) -> list[Line]:
    place = median_place(observation)
    check = main_check()

    def ours(change: Changed) -> bool:
        return check(case, Replayed(changed(observation, place, change))).outcome == "fail"

    def default_tolerances(change: Changed) -> bool:
        # In the dtype that is computed in: the tolerances of a finer one accuse clean engines.
        compute = TORCH_DTYPES[case.dtypes.compute]
        before, after = (part.to(compute) for part in _tensors(observation, place, change))
        try:
            torch.testing.assert_close(after, before)
        except AssertionError:
            return True
        return False

    def whole_tensor(change: Changed) -> bool:
        before, after = (tensor.double() for tensor in _tensors(observation, place, change))
        return bool((after - before).norm() > WHOLE_TENSOR * before.norm())

    finders = {
        "our check": ours,
        "assert_close": default_tolerances,
        "8.29 % of the tensor": whole_tensor,
    }
    return [
        Line(
            part="sensitivity",
            name=f"{name}: {finder}",
            value=smallest_found(found, _value(observation, place), _dtype(observation, place)),
            unit="relative",
        )
        for finder, found in finders.items()
    ]


class Replayed:
    """A `Run` that shows the same observation whatever it is asked."""

    def __init__(self, observation: Observation) -> None:
        self._observation = observation

    def __call__(self, case: Case) -> Observation:  # noqa: ARG002
        return self._observation

    def tables(
        self,
        *,
        mesh_shapes: tuple[tuple[int, int], ...] = (),
        strategies: tuple[tuple[int, bool], ...] = (),
    ) -> EngineTables:
        raise NotImplementedError


def median_place(observation: Observation) -> Place:
    """Where the element of median size among all that are not zero is."""
    found = [
        (abs(float(value)), rank.rank, part.name, index)
        for rank in observation.ranks
        for part in _train(rank).gradients
        if part.data is not None
        for index, value in enumerate(tensor_of(part.data).flatten().double())
        if value != 0.0
    ]
    _, rank_number, name, index = sorted(found)[len(found) // 2]
    return Place(rank=rank_number, name=name, index=index)


def changed(observation: Observation, place: Place, change: Changed) -> Observation:
    """The observation with the element changed. On a 1-D mesh one rank holds it."""
    ranks = list(observation.ranks)
    record = _train(ranks[place.rank])
    gradients = tuple(
        _with_change(part, place.index, change) if part.name == place.name else part
        for part in record.gradients
    )
    ranks[place.rank] = replace(ranks[place.rank], records=(replace(record, gradients=gradients),))
    return replace(observation, ranks=tuple(ranks))


def _with_change(part: LocalArray, index: int, change: Changed) -> LocalArray:
    assert part.data is not None
    tensor = tensor_of(part.data).clone()
    flat = tensor.view(-1)
    flat[index] = change(float(flat[index]))
    return replace(part, data=array_of(tensor))


def _train(rank: RankObservation) -> TrainRecord:
    (record,) = rank.records
    assert isinstance(record, TrainRecord)
    return record


def _tensors(observation: Observation, place: Place, change: Changed) -> Iterator[Tensor]:
    """The whole gradient before and after the change; parts of dim 0 in the order of the ranks."""
    for shown in (observation, changed(observation, place, change)):
        parts = [
            tensor_of(part.data)
            for rank in shown.ranks
            for part in _train(rank).gradients
            if part.name == place.name and part.data is not None
        ]
        yield torch.cat(parts)


def _value(observation: Observation, place: Place) -> float:
    return float(_part(observation, place).flatten()[place.index])


def _dtype(observation: Observation, place: Place) -> torch.dtype:
    return _part(observation, place).dtype


def _part(observation: Observation, place: Place) -> Tensor:
    parts = {part.name: part for part in _train(observation.ranks[place.rank]).gradients}
    data = parts[place.name].data
    assert data is not None
    return tensor_of(data)

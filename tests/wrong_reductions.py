"""Gradients as a wrong reduction would leave them, put into an observation of real ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fsdp_engine.contract.case import Case
from fsdp_engine.contract.observation import (
    LocalArray,
    Numerics,
    Observation,
    RankObservation,
    Replicate,
    Shard,
    TrainRecord,
)
from fsdp_engine.contract.protocol import EngineTables
from oracles.arrays import array_of
from oracles.evaluation import Evaluator
from oracles.records import train_actions
from oracles.reduction import emulate
from oracles.replay import LocalGradients, replay

Full = dict[str, Tensor]
Reduction = Callable[[Case, Observation], Full]


class Shown:
    """A run that has happened: whatever the case, it is this observation."""

    def __init__(self, observation: Observation) -> None:
        self._observation = observation

    def __call__(self, case: Case) -> Observation:
        assert len(self._observation.ranks) == case.mesh.world_size
        return self._observation

    def tables(
        self,
        *,
        mesh_shapes: tuple[tuple[int, int], ...] = (),
        strategies: tuple[tuple[int, bool], ...] = (),
    ) -> EngineTables:
        raise NotImplementedError((mesh_shapes, strategies))


def with_gradients(observation: Observation, full: Mapping[str, Tensor]) -> Observation:
    """Every rank's shards cut anew from the full tensors; placements stay."""

    def cut(part: LocalArray) -> LocalArray:
        tensor = full[part.name]
        if isinstance(part.placement, Shard):
            tensor = tensor.narrow(part.placement.dim, part.placement.start, part.placement.length)
        else:
            assert isinstance(part.placement, Replicate)
        return replace(part, data=array_of(tensor))

    return with_parts(observation, lambda _, part: cut(part))


def with_parts(
    observation: Observation, change: Callable[[int, LocalArray], LocalArray | None]
) -> Observation:
    """Every gradient part of the first action changed, or dropped where `change` gives None."""

    def changed(shown: RankObservation) -> RankObservation:
        def rewritten(record: TrainRecord) -> TrainRecord:
            parts = [change(shown.rank, part) for part in record.gradients]
            return replace(record, gradients=tuple(part for part in parts if part is not None))

        return with_record(shown, rewritten)

    return replace(observation, ranks=tuple(map(changed, observation.ranks)))


def with_record(
    shown: RankObservation, change: Callable[[TrainRecord], TrainRecord]
) -> RankObservation:
    """One rank's first record changed."""
    record = shown.records[0]
    assert isinstance(record, TrainRecord)
    return replace(shown, records=(change(record), *shown.records[1:]))


def right(case: Case, observation: Observation) -> Full:
    """What the declared levels give: the machinery itself accuses nobody."""
    local = _local(case, observation)
    full = {}
    for name in Evaluator(case).shapes:
        candidates = emulate(local, name, observation.numerics, case.mesh)
        assert candidates
        full[name] = candidates[0]
    return full


def sum_for_mean(case: Case, observation: Observation) -> Full:
    return {name: g * case.mesh.world_size for name, g in right(case, observation).items()}


def wrong_group(case: Case, observation: Observation) -> Full:
    """The mean over the first shard group only, as if replicas never met."""
    return _mean_over(case, observation, ranks=range(case.mesh.shards))


def dropped_rank(case: Case, observation: Observation) -> Full:
    world_size = case.mesh.world_size
    partial = _mean_over(case, observation, ranks=range(world_size - 1))
    return {name: g * ((world_size - 1) / world_size) for name, g in partial.items()}


def dropped_micro_batch(case: Case, observation: Observation) -> Full:
    return _mean_over(case, observation, ranks=range(case.mesh.world_size), first=1)


def mean_of_means(case: Case, observation: Observation) -> Full:
    """Every rank normalises by its own token count."""
    batch = case.batches[0]
    scales = [
        batch.loss_tokens / (case.mesh.world_size * sum(s.loss_tokens for s in rank))
        for rank in batch.ranks
    ]
    return _mean_over(case, observation, ranks=range(case.mesh.world_size), scales=scales)


def wrong_shard(case: Case, observation: Observation) -> Full:
    """The two halves of the first dimension change places."""
    full = right(case, observation)
    return {name: g.roll(g.shape[0] // 2, 0) for name, g in full.items()}


def slightly_scaled(case: Case, observation: Observation) -> Full:
    return {name: g * (1 + 2.0**-20) for name, g in right(case, observation).items()}


def one_element(case: Case, observation: Observation) -> Full:
    """The largest element of one parameter moves by four units in the last place."""
    full = right(case, observation)
    name = min(full)
    flat = full[name].flatten()
    index = int(flat.abs().argmax())
    flat[index] *= 1 + 2.0**-21
    return full | {name: flat.reshape(full[name].shape)}


def accumulated_in_bfloat16(case: Case, observation: Observation) -> Full:
    return {name: g.to(torch.bfloat16).to(g.dtype) for name, g in right(case, observation).items()}


WRONG: tuple[Reduction, ...] = (
    sum_for_mean,
    wrong_group,
    dropped_rank,
    dropped_micro_batch,
    mean_of_means,
    wrong_shard,
    slightly_scaled,
    one_element,
    accumulated_in_bfloat16,
)


def _local(case: Case, observation: Observation) -> LocalGradients:
    (action,) = train_actions(case, observation)
    evaluator = Evaluator(case)
    plans = [record.plan for record in action.records]
    return replay(evaluator, action.batch, plans, observation.numerics, evaluator.weights)


def _mean_over(
    case: Case,
    observation: Observation,
    *,
    ranks: range,
    first: int = 0,
    scales: list[float] | None = None,
) -> Full:
    """The mean over some ranks, from micro-batch `first` on; reduced eagerly, in float32."""
    declared: Numerics = observation.numerics
    assert not declared.deferred
    local = _local(case, observation)
    full = {}
    for name, shape in Evaluator(case).shapes.items():
        total = torch.zeros(shape)
        for rank in ranks:
            for gradients in local.reduced[rank][first:]:
                scale = 1.0 if scales is None else scales[rank]
                total += gradients.get(name, torch.zeros(shape)) * (scale / len(ranks))
        full[name] = total
    return full

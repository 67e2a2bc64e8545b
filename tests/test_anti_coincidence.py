"""No common wrong reduction can pass for the right one on data that the generators draw.

Over cases of every dtype policy, without ranks: each rank's gradient of each micro-batch is
replayed and put together with the weights that a mistake gives them. Where that is another number
at all, the check that judges engines must see it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import hypothesis
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from fsdp_engine.adapters.numerics import fsdp2_numerics
from fsdp_engine.contract.batch import Batch, Static
from fsdp_engine.contract.case import DTYPE_POLICIES, Case, LossMode
from oracles.arrays import Float64, float64_of
from oracles.compare import compare_with_replay
from oracles.evaluation import Evaluator
from oracles.planner import consecutive
from oracles.reduction import magnitude
from oracles.replay import replay
from oracles.rounding import allowance
from properties.strategies.cases import cases, rows

Counts: TypeAlias = npt.NDArray[np.int64]
"""`[ranks, micro-batches]`: what the loss mode averages over, tokens or sequences with tokens."""

Mistake: TypeAlias = Callable[[Case, Counts], Float64]
"""The factor with which each micro-batch of each rank enters the mean; all ones are right."""

NUM_CASES = 14


def _sum_for_mean(case: Case, counts: Counts) -> Float64:
    return np.full(counts.shape, float(case.mesh.world_size))


def _divided_twice(case: Case, counts: Counts) -> Float64:
    return np.full(counts.shape, 1.0 / case.mesh.world_size)


def _over_shards_only(case: Case, counts: Counts) -> Float64:
    """The replicas never meet: the mean of the first one's ranks."""
    return _of_ranks(counts, np.arange(len(counts)) < case.mesh.shards)


def _over_replicas_only(case: Case, counts: Counts) -> Float64:
    return _of_ranks(counts, np.arange(len(counts)) % case.mesh.shards == 0)


def _own_gradient(_: Case, counts: Counts) -> Float64:
    """No reduction at all, as rank 0 sees it."""
    return _of_ranks(counts, np.arange(len(counts)) == 0)


def _of_ranks(counts: Counts, chosen: npt.NDArray[np.bool_]) -> Float64:
    """The mean over some ranks."""
    return np.where(chosen[:, None], len(counts) / chosen.sum(), np.zeros(counts.shape))


def _dropped_rank(_: Case, counts: Counts) -> Float64:
    """The rank with the fewest tokens that has any: the hardest to miss."""
    weights = np.ones(counts.shape)
    sizes = counts.sum(1)
    weights[np.where(sizes > 0, sizes, sizes.max() + 1).argmin()] = 0.0
    return weights


def _counted_twice(case: Case, counts: Counts) -> Float64:
    """The same rank in the place of its neighbour as well."""
    return 2.0 - _dropped_rank(case, counts)


def _dropped_micro_batch(_: Case, counts: Counts) -> Float64:
    weights = np.ones(counts.shape)
    weights[:, -1] = 0.0
    return weights


def _last_micro_batch_only(case: Case, counts: Counts) -> Float64:
    return 1.0 - _dropped_micro_batch(case, counts)


def _first_micro_batch_twice(_: Case, counts: Counts) -> Float64:
    weights = np.ones(counts.shape)
    weights[:, 0] = 2.0
    return weights


def _mean_of_rank_means(case: Case, counts: Counts) -> Float64:
    """Every rank normalises by its own count."""
    own = np.maximum(counts.sum(1, keepdims=True), 1)
    result: Float64 = counts.sum() / (case.mesh.world_size * own) * np.ones(counts.shape)
    return result


def _mean_of_micro_batch_means(_: Case, counts: Counts) -> Float64:
    result: Float64 = counts.sum() / (counts.size * np.maximum(counts, 1))
    return result


def _averaged_over_micro_batches(_: Case, counts: Counts) -> Float64:
    """The accumulated gradient is divided by the number of micro-batches once more."""
    return np.full(counts.shape, 1.0 / counts.shape[1])


MISTAKES: tuple[Mistake, ...] = (
    _sum_for_mean, _divided_twice, _over_shards_only, _over_replicas_only, _own_gradient,
    _dropped_rank, _counted_twice, _dropped_micro_batch, _last_micro_batch_only,
    _first_micro_batch_twice, _mean_of_rank_means, _mean_of_micro_batch_means,
    _averaged_over_micro_batches,
)  # fmt: skip


class Drawn:
    """The replayed gradients of one case, and the check that would judge an engine's."""

    def __init__(self, case: Case) -> None:
        self._world_size = case.mesh.world_size
        numerics = replace(fsdp2_numerics(case), deferred=False)
        batch = case.batches[case.program[-1].batch]  # type: ignore[union-attr]  # a train action
        plans = [consecutive(len(rank), _per_micro_batch(case)) for rank in batch.ranks]
        evaluator = Evaluator(case)
        index = case.batches.index(batch)
        local = replay(evaluator, index, plans, numerics, evaluator.weights)
        self.counts = np.array(
            [
                [_count(batch, rank, part, case.engine.loss_mode) for part in plan]
                for rank, plan in enumerate(plans)
            ]
        )
        self._allowance = allowance(numerics, len(plans[0]))
        self.gradients: dict[str, Float64] = {}  # [ranks, micro-batches, *shape]
        for name, shape in evaluator.shapes.items():
            if any(name in part for rank in local.reduced for part in rank):
                self.gradients[name] = np.array(
                    [
                        [
                            float64_of(part[name]) if name in part else np.zeros(shape)
                            for part in rank
                        ]
                        for rank in local.reduced
                    ]
                )

    def reduced(self, weights: Float64) -> dict[str, Float64]:
        """The mean with these weights, in double."""
        return {
            name: np.tensordot(weights, parts, axes=2) / self._world_size
            for name, parts in self.gradients.items()
        }

    def differ(self, one: dict[str, Float64], other: dict[str, Float64]) -> bool:
        """Whether they are different numbers, and not the same ones by another road."""
        return any(
            bool((np.abs(one[name] - other[name]) > 2.0**-40 * self._sizes(name)).any())
            for name in one
        )

    def accused(self, got: dict[str, Float64]) -> bool:
        return any(
            compare_with_replay(
                gradient,
                self._terms(name),
                allowance=self._allowance,
                world_size=self._world_size,
                where=name,
            ).mismatch
            for name, gradient in got.items()
        )

    def _terms(self, name: str) -> Float64:
        parts = self.gradients[name]
        return parts.reshape(-1, *parts.shape[2:])

    def _sizes(self, name: str) -> Float64:
        return magnitude(self._terms(name), self._world_size)


def _per_micro_batch(case: Case) -> int:
    planning = case.engine.planning
    assert isinstance(planning, Static)
    return planning.sequences


def _count(batch: Batch, rank: int, part: tuple[int, ...], mode: LossMode) -> int:
    tokens = [batch.ranks[rank][index].loss_tokens for index in part]
    return sum(n > 0 for n in tokens) if mode.startswith("seq-mean") else sum(tokens)


@pytest.mark.parametrize("policy", DTYPE_POLICIES)
def test_every_mistake_shows_in_drawn_cases(policy: str) -> None:
    wrong: Counter[str] = Counter()
    hidden: list[str] = []
    drawn_cases = (
        rows()
        .map(lambda row: replace(row, dtypes=policy, planning="static"))
        .filter(lambda row: row.mesh != "single")
        .flatmap(cases)
    )

    @hypothesis.seed(11)
    @settings(
        max_examples=NUM_CASES,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(case=drawn_cases)
    def look(case: Case) -> None:
        drawn = Drawn(case)
        right = drawn.reduced(np.ones(drawn.counts.shape))
        assert not drawn.accused(right)
        told = {mistake.__name__[1:]: mistake(case, drawn.counts) for mistake in MISTAKES}
        results = {name: drawn.reduced(weights) for name, weights in told.items()}
        results["wrong_shard"] = {
            name: np.roll(gradient, gradient.shape[0] // 2, 0) for name, gradient in right.items()
        }
        for name, result in results.items():
            if drawn.differ(result, right):
                wrong[name] += 1
                if not drawn.accused(result):
                    hidden.append(f"{name} in {case}")

    look()
    assert not hidden
    for mistake in MISTAKES:
        assert wrong[mistake.__name__[1:]] >= 2, mistake
    assert wrong["wrong_shard"] >= NUM_CASES // 2

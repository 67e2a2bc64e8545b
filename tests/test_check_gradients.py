"""The gradient checks on real ranks: clean engines pass, every common wrong reduction fails."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from fsdp_engine.contract.case import Case, Mesh
from fsdp_engine.contract.model import Model
from fsdp_engine.contract.observation import LocalArray, Observation, Replicate, Shard
from fsdp_engine.contract.protocol import EAGER_FALLBACK
from fsdp_engine.world.pool import WorldPool
from oracles.arrays import array_of, tensor_of
from properties.checks.deferral import deferred_equals_eager
from properties.checks.exact import match_truth_bitwise
from properties.checks.gradients import match_oracle, replicas_agree
from properties.checks.split import partition_invariance, partitions
from tests.small_cases import exact_case, small_case
from tests.wrong_reductions import (
    WRONG,
    Reduction,
    Shown,
    mean_of_means,
    right,
    with_gradients,
    with_parts,
    with_record,
)

CASE = small_case(shape=(2, 2), model=Model(family="mlp", width=4, hidden=6, vocab=4, bias=True))


@pytest.fixture(scope="module")
def pool() -> Iterator[WorldPool]:
    with WorldPool("torch_fsdp2") as world:
        yield world


@pytest.fixture(scope="module")
def observation(pool: WorldPool) -> Observation:
    return pool(CASE)


def test_clean_ranks_pass_and_so_does_the_injection_itself(observation: Observation) -> None:
    assert match_oracle(CASE, Shown(observation)).passed
    assert match_oracle(CASE, Shown(with_gradients(observation, right(CASE, observation)))).passed


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_wrong_reductions_fail(observation: Observation, wrong: Reduction) -> None:
    shown = Shown(with_gradients(observation, wrong(CASE, observation)))
    verdict = match_oracle(CASE, shown)
    assert verdict.outcome == "fail"
    assert verdict.margin is not None
    assert verdict.margin > 1.0
    assert all("gradient" in mismatch.where for mismatch in verdict.mismatches)


def _nan(part: LocalArray) -> LocalArray:
    assert part.data is not None
    tensor = tensor_of(part.data)
    tensor.view(-1)[:1] = math.nan
    return replace(part, data=array_of(tensor))


def _narrow(part: LocalArray) -> LocalArray:
    assert part.data is not None
    return replace(part, data=array_of(tensor_of(part.data).to(torch.bfloat16)))


def _shifted(part: LocalArray) -> LocalArray:
    assert isinstance(part.placement, Shard)
    return replace(part, placement=replace(part.placement, start=part.placement.start + 1))


DAMAGE: dict[str, tuple[Callable[[LocalArray], LocalArray | None], str]] = {
    "a NaN": (_nan, "got nan"),
    "another dtype": (_narrow, "bfloat16"),
    "absent on one rank": (lambda part: replace(part, data=None), "absent on 1 of 2 ranks"),
    "missing on one rank": (lambda _: None, "got nothing, should be an entry"),
    "another name": (lambda part: replace(part, name="head.weight2"), "should be no such name"),
    "another shape": (lambda part: replace(part, full_shape=(99,)), "full shape"),
    "shifted": (_shifted, "a gap"),
    "replicated": (lambda part: replace(part, placement=Replicate()), "placements"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_parts_are_named(observation: Observation, damage: str) -> None:
    change, words = DAMAGE[damage]
    broken = with_parts(
        observation,
        lambda rank, part: change(part) if rank == 0 and part.name == "head.weight" else part,
    )
    verdict = match_oracle(CASE, Shown(broken))
    assert verdict.outcome == "fail"
    assert any(words in str(mismatch) and "head.weight" in str(mismatch) for mismatch in
               verdict.mismatches), verdict.mismatches  # fmt: skip


def test_one_bit_between_replicas_shows(observation: Observation) -> None:
    def flip(rank: int, part: LocalArray) -> LocalArray:
        if rank != 3 or part.name != "head.weight" or part.data is None:
            return part
        data = bytearray(part.data.data)
        data[0] ^= 1
        return replace(part, data=replace(part.data, data=bytes(data)))

    assert replicas_agree(CASE, Shown(observation)).passed
    verdict = replicas_agree(CASE, Shown(with_parts(observation, flip)))
    assert verdict.outcome == "fail"
    assert "head.weight, replica 1[2, 0]" in verdict.mismatches[0].where


def test_a_plan_that_is_no_partition_is_named(observation: Observation) -> None:
    def planned(plan: tuple[tuple[int, ...], ...]) -> Shown:
        changed = with_record(observation.ranks[0], lambda record: replace(record, plan=plan))
        return Shown(replace(observation, ranks=(changed, *observation.ranks[1:])))

    for plan, words in {
        ((0,), (0,)): "each of 0 to 1 once",
        ((0, 1), ()): "no empty micro-batch",
        ((0, 1),): "the same on all ranks",
    }.items():
        verdict = match_oracle(CASE, planned(plan))
        assert verdict.outcome == "fail"
        assert any(words in str(mismatch) for mismatch in verdict.mismatches)


@pytest.mark.parametrize("field", ["storage", "compute", "reduce", "deferred", "levels"])
def test_declared_numerics_are_held_against_the_case(observation: Observation, field: str) -> None:
    declared = observation.numerics
    values = {"deferred": True, "levels": declared.levels[:1]}
    changed = replace(declared, **{field: values.get(field, "float64")})  # type: ignore[arg-type]  # a field by name
    verdict = match_oracle(CASE, Shown(replace(observation, numerics=changed)))
    assert any(f"declared numerics: {field}" in m.where for m in verdict.mismatches)


def test_a_fall_back_is_judged_as_eager(pool: WorldPool) -> None:
    """Eager gradients under deferred numerics pass with the note and fail without it."""
    eager = small_case(shape=(2,), model=CASE.model, policy="fp32/bf16/bf16", micro_batches=4)
    deferred = replace(eager, engine=replace(eager.engine, deferred=True))
    shown = pool(eager)
    silent = replace(shown, numerics=replace(shown.numerics, deferred=True))
    assert match_oracle(deferred, Shown(silent)).outcome == "fail"
    notes = (f"{EAGER_FALLBACK}: why",)
    ranks = tuple(
        with_record(rank, lambda record: replace(record, notes=notes)) for rank in shown.ranks
    )
    assert match_oracle(deferred, Shown(replace(silent, ranks=ranks))).passed


def test_engines_that_cannot_be_replayed_are_not_judged(observation: Observation) -> None:
    own = replace(observation, numerics=replace(observation.numerics, replayable=False))
    assert match_oracle(CASE, Shown(own)).outcome == "not_applicable"


@pytest.mark.parametrize("policy", ["fp32", "fp64", "fp32/bf16/fp32"])
@pytest.mark.parametrize("shape", [(1,), (2,), (3,), (2, 2)], ids=str)
def test_exact_cases_are_bitwise(pool: WorldPool, shape: tuple[int, ...], policy: str) -> None:
    """At three ranks as well: the factor W of the loss makes the division exact."""
    case = exact_case(shape=shape, model=Model(family="mlp", width=3), policy=policy)
    verdict = match_truth_bitwise(case, pool)
    assert verdict.passed, verdict
    observation = pool(case)

    def scaled(_: int, part: LocalArray) -> LocalArray:
        assert part.data is not None
        tensor = tensor_of(part.data)
        return replace(part, data=array_of(torch.nextafter(tensor, 2 * tensor)))

    broken = Shown(with_parts(observation, scaled))
    assert match_truth_bitwise(case, broken).outcome == "fail"


def test_a_case_that_is_not_dyadic_is_not_applicable(observation: Observation) -> None:
    assert match_truth_bitwise(CASE, Shown(observation)).outcome == "not_applicable"


@pytest.mark.parametrize("policy", ["fp32", "fp32/bf16/fp32", "bf16/bf16/fp32"])
def test_deferred_equals_eager(pool: WorldPool, policy: str) -> None:
    case = small_case(shape=(2,), model=CASE.model, policy=policy, micro_batches=3)
    verdict = deferred_equals_eager(case, pool)
    assert verdict.passed, verdict
    assert verdict.margin is not None
    assert 0.0 < verdict.margin <= 1.0


def test_an_engine_that_never_defers_is_found(pool: WorldPool) -> None:
    """Eager whatever was asked, without a note: gradients agree, the reductions do not."""

    class AlwaysEager(Shown):
        def __call__(self, case: Case) -> Observation:
            options = replace(case.engine, config_source="dataclass", deferred=False)
            shown = pool(replace(case, engine=options))
            declared = replace(shown.numerics, deferred=case.engine.deferred)
            return replace(shown, numerics=declared)

    case = small_case(shape=(2,), model=CASE.model, micro_batches=3)
    verdict = deferred_equals_eager(case, AlwaysEager(pool(case)))
    assert verdict.outcome == "fail"
    assert any("reduce_scatter over shard" in mismatch.where for mismatch in verdict.mismatches)


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
def test_partition_invariance(pool: WorldPool, shape: tuple[int, ...]) -> None:
    assert partition_invariance(small_case(shape=shape, model=CASE.model), pool).passed
    exact = exact_case(shape=shape, model=Model(family="embedding", tied=True))
    assert partition_invariance(exact, pool).passed


def test_partitions_keep_the_sequences() -> None:
    others = partitions(CASE)
    assert len(others) == 2
    for other in others:
        assert sorted(s.key for s in other.batches[0].sequences) == list(range(8))
        assert other.batches != CASE.batches
    assert others[-1].mesh == Mesh(shape=(1, 1))


def test_an_engine_that_normalises_by_rank_depends_on_the_partition(pool: WorldPool) -> None:
    """One rank alone is right even then; the partition over four is not."""

    class MeanOfMeans(Shown):
        def __call__(self, case: Case) -> Observation:
            shown = pool(case)
            if case.mesh.world_size == 1:
                return shown
            return with_gradients(shown, mean_of_means(case, shown))

    verdict = partition_invariance(CASE, MeanOfMeans(pool(CASE)))
    assert verdict.outcome == "fail"

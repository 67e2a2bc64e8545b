"""The exact mean, the enumerated sums, and the engines' own reductions on real ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from fsdp_engine.contract.case import Case, Dtype, Mesh, Strategy
from fsdp_engine.contract.model import Model
from fsdp_engine.contract.observation import Level, Numerics
from fsdp_engine.world.pool import WorldPool
from oracles.evaluation import Evaluator
from oracles.exactness import exact_elements
from oracles.gradients import observed_gradients
from oracles.reduction import contributions, deviation, emulate, levels_follow_mesh, magnitude, mean
from oracles.replay import LocalGradients
from tests.small_cases import small_case

MODELS = {
    "mlp": Model(family="mlp", width=5, hidden=7, vocab=3, bias=True),
    "tied": Model(family="embedding", width=3, hidden=5, vocab=7, tied=True),
}


@pytest.fixture(scope="module", params=["torch_fsdp1", "torch_fsdp2"])
def engine(request: pytest.FixtureRequest) -> Iterator[tuple[Strategy, WorldPool]]:
    strategy: Strategy = "fsdp1" if request.param == "torch_fsdp1" else "fsdp2"
    with WorldPool(request.param) as pool:
        yield strategy, pool


@pytest.mark.parametrize("policy", ["fp32", "fp64", "fp32/bf16/fp32", "bf16/bf16/fp32"])
@pytest.mark.parametrize("deferred", [False, True], ids=["eager", "deferred"])
@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
def test_groups_of_two_are_emulated_bit_for_bit(
    engine: tuple[Strategy, WorldPool],
    shape: tuple[int, ...],
    deferred: bool,  # noqa: FBT001
    policy: str,
) -> None:
    """Final gradients of real ranks equal the emulation: so the replayed local ones do, too."""
    strategy, pool = engine
    for model in MODELS.values():
        case = small_case(
            shape=shape,
            model=model,
            policy=policy,
            micro_batches=3,
            deferred=deferred,
            strategy=strategy,
        )
        assert _unlike_every_candidate(case, pool) == 0


@pytest.mark.parametrize("size", [3, 4])
def test_larger_groups_are_one_of_the_trees(engine: tuple[Strategy, WorldPool], size: int) -> None:
    strategy, pool = engine
    case = small_case(
        shape=(size,), model=MODELS["mlp"], policy="fp32", micro_batches=1, strategy=strategy
    )
    assert _unlike_every_candidate(case, pool) == 0


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_the_wrong_accumulate_dtype_shows(strategy: Strategy) -> None:
    """FSDP1's rule used for FSDP2, or the reverse, is another gradient."""
    with WorldPool(f"torch_{strategy}") as pool:
        case = small_case(
            shape=(2,),
            model=MODELS["mlp"],
            policy="fp32/bf16/fp32",
            micro_batches=4,
            deferred=True,
            strategy=strategy,
        )
        observation = pool(case)
    other: Dtype = "float32" if observation.numerics.local_accumulate == "bfloat16" else "bfloat16"
    wrong = replace(observation, numerics=replace(observation.numerics, local_accumulate=other))
    (shown,) = observed_gradients(Evaluator(case), wrong)
    assert shown.prediction is not None
    margins = []
    for name in shown.prediction.shapes:
        terms = shown.prediction.terms(name)
        off = np.abs(deviation(shown.got(name), terms, 2))
        allowed = shown.prediction.allowed(name)
        margins.append((off[allowed > 0] / allowed[allowed > 0]).max(initial=0.0))
    assert max(margins) > 1000


def test_mean_and_magnitude_against_fractions() -> None:
    gen = np.random.default_rng(3)
    terms = gen.standard_normal((12, 50)) * 2.0 ** gen.integers(-60, 60, (12, 50))
    terms[6:] = -terms[:6] * (1 + 2.0**-50)
    for column in range(50):
        exact = sum(map(Fraction, map(float, terms[:, column]))) / 3
        assert Fraction(float(mean(terms, 3)[column])) == pytest.approx(exact, rel=2.0**-51, abs=0)
        total = sum(abs(Fraction(float(term))) for term in terms[:, column]) / 3
        assert (
            total
            <= Fraction(float(magnitude(terms, 3)[column]))
            <= total * (1 + Fraction(1, 2**46))
        )


@pytest.mark.parametrize(("size", "count"), [(1, 1), (2, 1), (3, 3), (4, 15)])
def test_number_of_binary_trees(size: int, count: int) -> None:
    declared = _numerics((Level(axis="shard", size=size, after=float(size)),))
    values = torch.randn(size, 1, 5, generator=torch.Generator().manual_seed(0))
    candidates = emulate(_locals(values), "w", declared, Mesh(shape=(size,)))
    assert candidates is not None
    assert len(candidates) == count
    assert emulate(_locals(values), "other", declared, Mesh(shape=(size,))) == []


def test_too_many_candidates_or_another_mesh_give_none() -> None:
    five = _numerics((Level(axis="shard", size=5, after=5.0),))
    assert emulate(_locals(torch.ones(5, 1, 1)), "w", five, Mesh(shape=(5,))) is None
    eager = _numerics((Level(axis="shard", size=4, after=4.0),))
    assert emulate(_locals(torch.ones(4, 3, 1)), "w", eager, Mesh(shape=(4,))) is None
    assert not levels_follow_mesh(eager, Mesh(shape=(2, 2)))
    assert emulate(_locals(torch.ones(4, 1, 1)), "w", eager, Mesh(shape=(2, 2))) is None


def test_certificate_divides_by_three_only_where_it_divides() -> None:
    """At three ranks a sum must be a multiple of three, divided at once or by 2 and then 1.5."""
    values = torch.tensor([[[3.0, 1.0, 0.75]], [[6.0, 1.0, 1.5]], [[0.0, 2.0, 0.75]]])
    for before, after in ((1.0, 3.0), (2.0, 1.5)):
        declared = _numerics((Level(axis="shard", size=3, before=before, after=after),))
        assert _certified(values, declared) == [True, False, True]


def test_certificate_needs_the_sums_to_fit() -> None:
    """8 bits hold integers to 256; a rounded local gradient is no evidence at all."""
    values = torch.tensor([[[128.0, 255.0, 1.0]], [[128.0, 2.0, 2.0**-20]]])
    declared = replace(_numerics((Level(axis="shard", size=2, after=2.0),)), reduce="bfloat16")
    assert _certified(values, declared) == [True, False, False]
    moved = values.double()
    moved[0, 0, 0] += 2.0**-40
    assert _certified(values, declared, wide=moved) == [False, False, False]


def _unlike_every_candidate(case: Case, pool: WorldPool) -> int:
    """Elements that no declared reduction of the replayed gradients gives."""
    (shown,) = observed_gradients(Evaluator(case), pool(case))
    assert shown.prediction is not None
    assert not shown.mismatches
    wrong = 0
    for name, shape in shown.prediction.shapes.items():
        candidates = shown.prediction.candidates(name)
        assert candidates
        assert len(candidates) == 1 or max(case.mesh.shape) > 2
        possible = np.stack([candidate.double().numpy() for candidate in candidates])
        assert possible.shape[1:] == shape
        wrong += int((~(possible == shown.got(name)).any(0)).sum())
    return wrong


def _certified(
    values: torch.Tensor, declared: Numerics, wide: torch.Tensor | None = None
) -> list[bool]:
    mask = exact_elements(
        "w",
        tuple(values.shape[2:]),
        narrow=_locals(values),
        wide=_locals(values if wide is None else wide),
        numerics=declared,
        mesh=Mesh(shape=(len(values),)),
    )
    return [bool(element) for element in mask]


def _locals(values: torch.Tensor) -> LocalGradients:
    """`[ranks, reductions, ...]` as one parameter `w`."""
    reduced = tuple(tuple({"w": gradient} for gradient in rank) for rank in values)
    local = LocalGradients(reduced=reduced, losses=(), used=())
    assert contributions(local, "w", tuple(values.shape[2:])).shape[1:] == values.shape[2:]
    return local


def _numerics(levels: tuple[Level, ...]) -> Numerics:
    return Numerics(
        storage="float32",
        compute="float32",
        reduce="float32",
        deferred=False,
        local_accumulate="float32",
        shard_accumulate="float32",
        norm="float32",
        levels=levels,
        units=(),
    )

"""Engines of others: what they lack is said, and where they run they agree with each other."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias

import pytest

from fsdp_engine.adapters.numerics import fsdp1_numerics, fsdp2_numerics
from fsdp_engine.contract.actions import Infer, Load, Save, Train
from fsdp_engine.contract.case import DTYPE_POLICIES, EngineOptions
from fsdp_engine.contract.errors import EngineLoadError, NotOffered, UnsupportedCase
from fsdp_engine.contract.model import Model
from fsdp_engine.contract.observation import Level
from fsdp_engine.contract.protocol import Engine
from fsdp_engine.world.pool import WorldPool
from fsdp_engine.world.registry import OPTIONAL, load_engine
from properties.catalog import load_check
from properties.judge import Judge
from properties.known_issues import KNOWN_ISSUES
from properties.outcome import ending_of
from properties.trial import Trial
from tests.known_issue_cases import SHOWN
from tests.world_cases import world_case

LIBRARIES = {"torch_ddp": "torch", "accelerate": "accelerate", "lightning": "lightning_fabric"}
INSTALLED = tuple(name for name, library in LIBRARIES.items() if find_spec(library) is not None)
ENGINES = ("reference", "torch_fsdp1", "torch_fsdp2", *INSTALLED)

Pools: TypeAlias = dict[str, WorldPool]


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    pools = {name: WorldPool(name) for name in ENGINES}
    yield pools
    for pool in pools.values():
        pool.close()


def _engine(name: str) -> Engine:
    pytest.importorskip(LIBRARIES[name], reason=f"{LIBRARIES[name]} is not installed")
    return load_engine(name)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("lora_rank", [0, 2])
def test_accelerate_shards_a_language_model_in_the_units_it_is_said_to(
    pools: Pools, lora_rank: int, *, tied: bool
) -> None:
    """Embedding and head are units of their own there, an adapter hides the last norm."""
    _engine("accelerate")
    model = Model(family="llama", width=8, hidden=6, vocab=11, tied=tied, lora_rank=lora_rank)
    case = world_case("fsdp2", model=model)
    for name in ("every-unit-is-reduced", "gradient-matches-oracle"):
        verdict = ending_of(load_check(name), case, pools["accelerate"]).verdict
        assert verdict.passed, (name, verdict.mismatches[:3])


@pytest.mark.parametrize("name", ["accelerate", "lightning"])
def test_what_torch_gets_wrong_shows_through_and_is_known(
    pools: Pools, tmp_path: Path, name: str
) -> None:
    _engine(name)
    (shown,) = (one for one in SHOWN if one.id == "fsdp2-restore-while-gathered")
    judge = Judge(
        trial=Trial(worlds=pools[name], engine=name, known_issues=KNOWN_ISSUES),
        repro_folder=tmp_path,
    )
    judge(load_check(shown.found_by), shown.case)
    (tally,) = judge.tallies.values()
    assert tally.known_issue == {shown.id: 1}


@pytest.mark.parametrize("name", ["accelerate", "lightning"])
def test_checkpoints_are_gone_on_from(pools: Pools, name: str) -> None:
    _engine(name)
    program = (Train(step=True), Save(), Train(step=True), Load(), Train(step=True))
    case = world_case("fsdp2", program=program)
    verdict = ending_of(load_check("resume-equals-uninterrupted"), case, pools[name]).verdict
    assert verdict.passed, verdict.mismatches[:3]


@pytest.mark.parametrize("name", LIBRARIES)
def test_what_is_lacking_is_refused_in_words(name: str) -> None:
    engine = _engine(name)
    assert "axis" in str(engine.supports(world_case("fsdp2", mesh=(1, 2)))) or name == "torch_ddp"
    assert "mesh" in str(engine.supports(world_case("fsdp1", mesh=(2, 2)))) or name == "lightning"
    yaml = EngineOptions(config_source="yaml", deferred=True)
    mesh = (2, 1) if name == "torch_ddp" else (2,)
    assert "configuration" in str(engine.supports(world_case("fsdp2", mesh=mesh, engine=yaml)))


@pytest.mark.parametrize("policy", DTYPE_POLICIES)
def test_nothing_wider_than_torch_computes_is_declared(policy: str) -> None:
    dtypes = DTYPE_POLICIES[policy]
    for name in set(INSTALLED) - {"torch_ddp"}:
        for deferred in (False, True):
            two = world_case("fsdp2", dtypes=dtypes, deferred=deferred)
            assert load_engine(name).numerics(two) == fsdp2_numerics(two)
            one = world_case("fsdp1", dtypes=dtypes, deferred=deferred)
            assert name == "lightning" or load_engine(name).numerics(one) == fsdp1_numerics(one)


def test_the_control_sums_once_over_all_replicas() -> None:
    numerics = load_engine("torch_ddp").numerics(world_case("fsdp2", mesh=(4, 1), deferred=True))
    assert numerics.levels == (Level(axis="replicate", size=4, before=4.0),)
    assert [unit.name for unit in numerics.units] == [""]


def test_an_action_or_ability_that_is_not_offered_is_no_refusal_of_the_engine(pools: Pools) -> None:
    """Its capabilities say so, and no property is unsatisfiable by it."""
    pool = pools["torch_fsdp2"]
    with pytest.raises(NotOffered, match="no save action"):
        pool(world_case("fsdp2", program=(Save(),)))
    merged = Infer(adapter="merged")
    with pytest.raises(NotOffered, match="inference without the adapter"):
        pool(world_case("fsdp2", model=Model(family="mlp", lora_rank=2), program=(merged,)))
    with pytest.raises(UnsupportedCase) as refused:
        pool(world_case("fsdp1"))
    assert not isinstance(refused.value, NotOffered)


def test_a_device_that_is_declined_while_building_leaves_the_world_whole() -> None:
    with WorldPool("tests.engines.for_judging:DeclinesOddSeeds") as pool:
        for seed in (1, 2, 3, 4):
            case = world_case("fsdp2", seed=seed)
            if seed % 2:
                with pytest.raises(NotOffered, match=f"no seed {seed} on cpu"):
                    pool(case)
            else:
                assert len(pool(case).ranks) == 2


def test_an_engine_whose_library_is_missing_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> object:
        raise ModuleNotFoundError(f"No module named {name!r}", name="lightning_fabric")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(
        EngineLoadError, match=r"lightning_fabric is not installed; pip .*lightning"
    ):
        load_engine("lightning")
    assert "lightning" in OPTIONAL

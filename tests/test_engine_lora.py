"""The reference engine's adapters on real ranks: every way out of a merge, and what is refused."""

from __future__ import annotations

import pytest

from fsdp_engine.contract.actions import Export, Infer, Train
from fsdp_engine.contract.case import DTYPE_POLICIES, Strategy
from fsdp_engine.contract.errors import ConfigError
from fsdp_engine.contract.model import Model
from fsdp_engine.contract.observation import ExportRecord, Observation
from fsdp_engine.engine.lora import find_adapter
from fsdp_engine.workload.models import build_model
from fsdp_engine.world.pool import WorldPool
from oracles.metamorphic import record_mismatches
from tests.world_cases import world_case

TIMEOUT_S = 60.0
ADAPTED = Model(family="embedding", units=2, lora_rank=2, lora_alpha=3, lora_targets="all")
TIED = Model(family="embedding", tied=True, lora_rank=2, lora_targets="all")
STRATEGIES: tuple[Strategy, ...] = ("fsdp1", "fsdp2")
PROGRAMS = ((Infer(), Train(step=True)), (Train(step=True), Infer(), Train()))


def assert_same(one: Observation, other: Observation) -> None:
    """Every action showed the same bits on every rank."""
    for rank, alone in zip(one.ranks, other.ranks, strict=True):
        for index, record in enumerate(rank.records):
            where = f"rank {rank.rank} action {index}"
            assert not record_mismatches(where, record, alone.records[index])


@pytest.mark.parametrize(
    "attempt", ["RaisesInMerged", "RaisesInMerge", "UsesMerged", "RaisesWhileDisabled"]
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nothing_is_left_of_an_attempt(strategy: Strategy, attempt: str) -> None:
    with (
        WorldPool(f"tests.engines.adapted:{attempt}", case_timeout_s=TIMEOUT_S) as pool,
        WorldPool("reference", case_timeout_s=TIMEOUT_S) as reference,
    ):
        for program in PROGRAMS:
            for reshard in (True, False):
                case = world_case(
                    strategy,
                    mesh=(2,) if reshard else (2, 1),
                    reshard_after_forward=reshard,
                    model=ADAPTED,
                    dtypes=DTYPE_POLICIES["fp32/bf16/fp32"],
                    program=program,
                )
                assert_same(pool(case), reference(case))


@pytest.mark.parametrize("model", [TIED, Model(family="mlp")])
def test_what_cannot_be_merged_is_refused(model: Model) -> None:
    with WorldPool("tests.engines.adapted:Refuses", case_timeout_s=TIMEOUT_S) as pool:
        pool(world_case(model=model, program=(Infer(),)))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("layered", "num_gathers"), [(False, 1), (True, 3)])
def test_an_adapter_is_gathered_at_once_or_unit_by_unit(
    strategy: Strategy, *, layered: bool, num_gathers: int
) -> None:
    program = (Export(weights="adapter", layered=layered),)
    case = world_case(strategy, mesh=(3,), model=ADAPTED, program=program)
    with WorldPool("reference", case_timeout_s=TIMEOUT_S) as pool:
        observation = pool(case)
    for rank in observation.ranks:
        (record,) = rank.records
        assert isinstance(record, ExportRecord)
        assert len(record.tensors) == 2 * (2 * 2 + 2)
        gathers = [c for c in record.collectives if c.operation == "all_gather"]
        assert len(gathers) == num_gathers + 1, gathers  # one of all bounds before them


def test_an_adapter_that_cannot_be_merged_is_refused() -> None:
    import peft

    case = world_case(model=Model(family="mlp"))
    config = peft.LoraConfig(target_modules=["up"], use_dora=True)
    model = peft.get_peft_model(build_model(case), config)
    with pytest.raises(ConfigError, match="up: Linear over Linear; legal are plain LoRA"):
        find_adapter(model, ())

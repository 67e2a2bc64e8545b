"""A folder that the engine writes is a model that `transformers` loads, with the same logits."""

from __future__ import annotations

import pytest

from fsdp_engine.contract.actions import Infer, Train
from fsdp_engine.contract.case import DTYPE_POLICIES, Strategy
from fsdp_engine.contract.errors import EngineRaised
from fsdp_engine.contract.model import LoraTargets, Model
from fsdp_engine.world.pool import WorldPool
from tests.world_cases import world_case

TIMEOUT_S = 60.0
PROGRAM = (Train(step=True), Infer())


def save_and_load(
    kind: str, model: Model, strategy: Strategy = "fsdp2", mesh: tuple[int, ...] = (2,)
) -> None:
    """Raises where what is loaded is not what was trained."""
    policy = DTYPE_POLICIES["bf16/bf16/fp32" if strategy == "fsdp1" else "fp32"]
    case = world_case(
        strategy, mesh=mesh, micro_batches=1, model=model, dtypes=policy, program=PROGRAM
    )
    with WorldPool(f"tests.engines.saving:{kind}", case_timeout_s=TIMEOUT_S) as pool:
        pool(case)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_plain(strategy: Strategy, *, tied: bool) -> None:
    save_and_load("Saves", Model(family="llama", tied=tied, vocab=7), strategy)


@pytest.mark.parametrize("kind", ["Saves", "SavesUnfused"])
def test_experts(kind: str) -> None:
    save_and_load(kind, Model(family="mixtral", hidden=6), mesh=(3,))


@pytest.mark.parametrize("kind", ["SavesBase", "SavesMerged"])
@pytest.mark.parametrize(("targets", "tied"), [("units", True), ("all", False), ("root", True)])
def test_with_an_adapter(kind: str, targets: LoraTargets, *, tied: bool) -> None:
    strategy: Strategy = "fsdp1" if targets == "units" else "fsdp2"
    save_and_load(
        kind,
        Model(family="qwen2", tied=tied, vocab=6, lora_rank=2, lora_alpha=3, lora_targets=targets),
        strategy,
    )


def test_experts_beside_an_adapter() -> None:
    save_and_load("SavesMergedUnfused", Model(family="mixtral", lora_rank=1, lora_targets="all"))


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (Model(family="embedding"), "TorchModel has no config to write"),
        (Model(family="llama", lora_rank=1), "has peft's names"),
    ],
)
def test_what_cannot_be_loaded_is_not_written(model: Model, sentence: str) -> None:
    with pytest.raises(EngineRaised) as raised:
        save_and_load("Saves", model)
    assert set(raised.value.kinds.values()) == {"ConfigError"}
    assert all(sentence in text for text in raised.value.by_rank.values())

"""The model and data both sides start from: pinned, independent of partition, as described."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fsdp_engine.contract.batch import Batch, Sequence
from fsdp_engine.contract.case import DTYPE_POLICIES, Case, DtypePolicy, Mesh
from fsdp_engine.contract.model import Family, LoraTargets, Model
from fsdp_engine.workload.batches import global_batch, local_batch
from fsdp_engine.workload.losses import token_loss
from fsdp_engine.workload.models import (
    build_model,
    module_arguments,
    trained_names,
    unit_names,
    unit_of,
)

TWO_RANKS = Batch(
    ranks=(
        (Sequence(key=3, length=3, loss_tokens=2), Sequence(key=1, length=5, loss_tokens=4)),
        (Sequence(key=0, length=2, loss_tokens=1, gated=False), Sequence(key=7, length=4)),
    )
)


def case_for(model: Model, *, exact: bool = False, dtypes: DtypePolicy | None = None) -> Case:
    return Case(model=model, batches=(TWO_RANKS,), exact=exact, dtypes=dtypes or DtypePolicy())


def digest(named: list[tuple[str, Tensor]]) -> str:
    parts = [f"{name} {tuple(t.shape)} {t.double().tolist()}" for name, t in named]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


# Pinned so that no change of the workload goes unnoticed: engine and oracle both start here, so a
# mistake in it would be invisible to every comparison.
GOLDEN: dict[Family, tuple[str, str]] = {
    "linear": ("9601057352ce", "124bcd48e3ab"),
    "mlp": ("461a771b6dc7", "124bcd48e3ab"),
    "embedding": ("c338e2771cab", "faf826d6a40d"),
    "llama": ("a56f560de057", "faf826d6a40d"),
    "qwen2": ("b4b9f6f995e4", "faf826d6a40d"),
    "mixtral": ("25d193e0e6af", "faf826d6a40d"),
}


@pytest.mark.parametrize("family", list(GOLDEN))
def test_weights_and_data_are_pinned(family: Family) -> None:
    case = case_for(Model(family=family, units=2))
    module = build_model(case)
    micro_batch = global_batch(case, 0).select(range(4))
    data = [*micro_batch.inputs.items(), ("targets", micro_batch.targets)]
    assert (digest([*module.named_parameters()]), digest(data)) == GOLDEN[family]


def test_a_sequence_keeps_its_content_wherever_it_is_put() -> None:
    case = case_for(Model(family="embedding"))
    moved = replace(
        case, mesh=Mesh(shape=(1,)), batches=(Batch(ranks=(TWO_RANKS.sequences[::-1],)),)
    )
    first = local_batch(case, 0, 1).select([1])
    second = local_batch(moved, 0, 0).select([0])
    assert torch.equal(first.inputs["input_ids"], second.inputs["input_ids"])
    assert torch.equal(first.targets, second.targets)
    assert torch.equal(first.loss_mask, second.loss_mask)


def test_padding_carries_no_loss_and_is_masked() -> None:
    case = case_for(Model(family="embedding"))
    micro_batch = local_batch(case, 0, 0).select([0, 1])
    assert micro_batch.inputs["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert micro_batch.loss_mask.sum(1).tolist() == [2, 4]
    assert not micro_batch.loss_mask[0, 3:].any()


@pytest.mark.parametrize("name", list(DTYPE_POLICIES))
def test_parameters_are_stored_in_the_storage_dtype(name: str) -> None:
    policy = DTYPE_POLICIES[name]
    for family in ("mlp", "llama"):
        module = build_model(case_for(Model(family=family), dtypes=policy))
        assert {str(p.dtype) for p in module.parameters()} == {f"torch.{policy.storage}"}


def test_exact_weights_and_data_are_small_integers() -> None:
    case = case_for(Model(family="linear", bias=True, buffers=True), exact=True)
    for parameter in build_model(case).parameters():
        assert set(parameter.flatten().tolist()) <= {-1.0, 0.0, 1.0}
    features = global_batch(case, 0).select([0, 1]).inputs["features"]
    assert torch.equal(features, features.round())


@pytest.mark.parametrize(
    ("model", "absent"),
    [
        (Model(units=2, optional="unit"), {"layers.1.linear.weight"}),
        (Model(units=2, optional="parameter"), {"layers.1.extra"}),
    ],
)
def test_optional_parts_are_used_by_gated_sequences_only(model: Model, absent: set[str]) -> None:
    case = case_for(model)
    batch = local_batch(case, 0, 1)
    assert without_gradient(case, build_model(case), batch.select([0]).inputs) == absent
    assert without_gradient(case, build_model(case), batch.select([0, 1]).inputs) == set()


def without_gradient(case: Case, module: nn.Module, inputs: dict[str, Tensor]) -> set[str]:
    output: Tensor = module(**module_arguments(case, inputs))
    output.sum().backward()  # type: ignore[no-untyped-call]  # torch leaves backward untyped
    return {name for name, p in module.named_parameters() if p.requires_grad and p.grad is None}


def test_an_ungated_sequence_is_not_changed_by_its_gated_neighbour() -> None:
    """Of exact data: how a processor rounds a row may depend on how many rows there are."""
    case = case_for(Model(units=2, optional="unit"), exact=True)
    module, batch = build_model(case), local_batch(case, 0, 1)
    alone = module(**batch.select([0]).inputs)
    together = module(**batch.select([0, 1]).inputs)
    assert torch.equal(alone[0, :2], together[0, :2])


@pytest.mark.parametrize("family", ["linear", "mlp", "embedding", "llama", "qwen2", "mixtral"])
@pytest.mark.parametrize("lora_rank", [0, 2])
def test_units_exist_and_own_their_parameters(family: Family, lora_rank: int) -> None:
    case = case_for(Model(family=family, units=2, lora_rank=lora_rank))
    module = build_model(case)
    for name in unit_names(case):
        owned = {f"{name}.{inner}" for inner, _ in module.get_submodule(name).named_parameters()}
        assert owned == {n for n, _ in module.named_parameters() if unit_of(case, n) == name}
    trainable = {name for name, p in module.named_parameters() if p.requires_grad}
    assert trainable
    assert all("lora_" in name for name in trainable) == (lora_rank > 0)


@pytest.mark.parametrize(
    ("targets", "layers"),
    [
        ("units", {"layers.0.up", "layers.0.down"}),
        ("named", {"layers.0.up"}),
        ("root", {"embed", "head"}),
        ("all", {"layers.0.up", "layers.0.down", "embed", "head"}),
    ],
)
def test_adapters_are_on_the_layers_that_are_asked_for(
    targets: LoraTargets, layers: set[str]
) -> None:
    model = Model(family="embedding", lora_rank=1, lora_targets=targets)
    found = {name.partition(".lora_")[0] for name in trained_names(model)}
    assert found == {f"base_model.model.{layer}" for layer in layers}


def test_tied_models_have_one_weight_for_embedding_and_head() -> None:
    for family in ("embedding", "llama"):
        untied = build_model(case_for(Model(family=family)))
        tied = build_model(case_for(Model(family=family, tied=True)))
        assert len(list(tied.parameters())) == len(list(untied.parameters())) - 1


@pytest.mark.parametrize("name", list(DTYPE_POLICIES))
def test_losses_are_fp32_or_fp64(name: str) -> None:
    policy = DTYPE_POLICIES[name]
    case = case_for(Model(family="embedding"), dtypes=policy)
    module = build_model(case).to(getattr(torch, policy.compute))
    micro_batch = local_batch(case, 0, 0).select([0])
    losses = token_loss(case)(module(**micro_batch.inputs), micro_batch)
    assert losses.shape == micro_batch.loss_mask.shape
    assert losses.dtype == (torch.float64 if policy.compute == "float64" else torch.float32)

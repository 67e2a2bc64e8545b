"""Adapters in exports: names are peft's, merged weights within a bound that peft's keep."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import peft
import pytest
import torch
from torch import Tensor

from fsdp_engine.contract.actions import Export
from fsdp_engine.contract.case import DTYPE_POLICIES, Case
from fsdp_engine.contract.model import Family, LoraTargets, Model
from fsdp_engine.contract.observation import ExportRecord, Record
from fsdp_engine.workload.models import build_model
from oracles.adapters import adapter_tensors, base_tensors, merged_weights
from oracles.arrays import array_of, float64_of, tensor_of
from oracles.compare import compare_within
from oracles.export import predict, predict_initial
from properties.checks import lora
from tests.observed import Answers, everywhere, observed, showing, worked_case

ADAPTED = Model(family="qwen2", units=2, vocab=7, lora_rank=2, lora_alpha=3, lora_targets="all")


def adapted_case(policy: str = "fp32", **changes: Any) -> Case:
    case = worked_case(model=dataclasses.replace(ADAPTED, **changes))
    return dataclasses.replace(case, dtypes=DTYPE_POLICIES[policy])


def exported(case: Case, weights: Literal["base", "adapter", "merged"]) -> dict[str, Tensor]:
    parameters = {name: p.detach() for name, p in build_model(case).named_parameters()}
    return predict(case, parameters, Export(weights=weights)).tensors


@pytest.mark.parametrize("family", ["mlp", "embedding", "qwen2", "mixtral"])
@pytest.mark.parametrize("targets", ["units", "named", "root", "all"])
def test_names_and_values_are_those_that_peft_gives(family: Family, targets: LoraTargets) -> None:
    case = adapted_case(family=family, lora_targets=targets)
    module: Any = build_model(case)
    saved = peft.get_peft_model_state_dict(module, save_embedding_layers=False)
    adapter = exported(case, "adapter")
    assert adapter.keys() == saved.keys()
    assert all(torch.equal(adapter[name], tensor) for name, tensor in saved.items())
    plain = module.unload().state_dict()
    base = exported(case, "base")
    assert list(base) == list(plain)
    assert all(torch.equal(base[name], tensor) for name, tensor in plain.items())


def test_all_linear_layers_of_a_language_model_are_those_of_its_units() -> None:
    case = adapted_case(lora_targets="units")
    module: Any = build_model(dataclasses.replace(case, model=case.model.without_adapter))
    linear = peft.get_peft_model(module, peft.LoraConfig(target_modules="all-linear"))
    assert {name for name, _ in linear.named_parameters()} == {
        name for name, _ in build_model(case).named_parameters()
    }


@pytest.mark.parametrize("policy", ["fp32", "fp64", "bf16/bf16/fp32"])
@pytest.mark.parametrize("rank", [1, 4])
def test_what_peft_merges_is_within_the_bound(policy: str, rank: int) -> None:
    case = adapted_case(policy, lora_rank=rank, width=8)
    bounds = merged_weights(case, exported(case, "base"), exported(case, "adapter"))
    assert len(bounds) == 2 * 7 + 2
    module: Any = build_model(case)
    merged = module.merge_and_unload().state_dict()
    margins = [
        compare_within(float64_of(merged[name]), bound.value, bound.error, where=name).margin
        for name, bound in bounds.items()
    ]
    assert max(margins) <= 1.0
    assert max(margins) > 0.0 or policy == "fp64"  # there the oracle computes in the same format


def test_scaled_by_zero_nothing_is_added() -> None:
    case = adapted_case(lora_alpha=0)
    assert not merged_weights(case, exported(case, "base"), exported(case, "adapter"))


def test_both_places_of_a_tied_pair_get_their_own_adapter() -> None:
    case = adapted_case(tied=True)
    base = exported(case, "base")
    assert torch.equal(base["lm_head.weight"], base["model.embed_tokens.weight"])
    bounds = merged_weights(case, base, exported(case, "adapter"))
    first, second = bounds["lm_head.weight"].value, bounds["model.embed_tokens.weight"].value
    assert (first != second).any()


def test_experts_have_the_names_and_values_of_published_checkpoints() -> None:
    from transformers.core_model_loading import revert_weight_conversion

    case = adapted_case(family="mixtral", lora_rank=0, lora_alpha=2, lora_targets="units")
    module: Any = build_model(case)
    published = revert_weight_conversion(module, module.state_dict())
    parameters = {name: p.detach() for name, p in module.named_parameters()}
    unfused = predict(case, parameters, Export(unfuse=True)).tensors
    assert unfused.keys() == published.keys()
    assert all(torch.equal(unfused[name], tensor) for name, tensor in published.items())


PHASES = (Export(weights="base"), Export(weights="adapter"), Export(weights="merged"))
SYNC = dataclasses.replace(adapted_case(), program=PHASES)


def test_two_phases_that_make_the_merged_model_pass() -> None:
    verdict = lora.two_phase_equals_merged(SYNC, showing(observed(SYNC)))
    assert verdict.passed
    assert verdict.margin_kind == "rigorous"


def without_first(record: Record) -> Record:
    assert isinstance(record, ExportRecord)
    return dataclasses.replace(record, tensors=record.tensors[1:])


def with_more(record: Record) -> Record:
    """The first tensor changed by about four roundings."""
    assert isinstance(record, ExportRecord)
    first, *others = record.tensors
    value = array_of(tensor_of(first.value) * (1 + 2.0**-21))
    return dataclasses.replace(record, tensors=(dataclasses.replace(first, value=value), *others))


@pytest.mark.parametrize(
    ("index", "change", "sentence"),
    [
        (0, without_first, "names"),
        (1, without_first, "parts of the adapter that have a weight: got 30, should be 31"),
        (2, without_first, "names"),
        (0, with_more, "base and adapter against merged"),
        (2, with_more, "base and adapter against merged"),
    ],
)
def test_phases_that_differ_are_found(index: int, change: Any, sentence: str) -> None:
    run = showing(everywhere(observed(SYNC), index, change))
    verdict = lora.two_phase_equals_merged(SYNC, run)
    assert any(sentence in str(mismatch) for mismatch in verdict.mismatches), verdict.mismatches


@pytest.mark.parametrize("check", [lora.two_phase_equals_merged, lora.switch_matches_oracle])
def test_other_programs_are_not_judged(check: Any) -> None:
    plain = worked_case(program=(Export(),))
    adapted = dataclasses.replace(SYNC, program=PHASES[:2])
    assert check(plain, Answers()).outcome == "not_applicable"
    assert check(adapted, Answers()).outcome == "not_applicable"


def test_an_adapter_is_told_by_the_names_of_the_whole_model() -> None:
    whole = predict_initial(SYNC).tensors
    assert len(base_tensors(SYNC, whole)) + len(adapter_tensors(whole)) == len(whole)

"""Faults in the model that ranks start from."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from fsdp_engine.adapters import reference as adapter
from fsdp_engine.contract.case import Case
from fsdp_engine.workload import models as models_module
from fsdp_engine.workload.models import build_model
from tests.faults.planting import Planted


def _from_rank_seed(case: Case) -> nn.Module:
    return build_model(dataclasses.replace(case, seed=case.seed ^ dist.get_rank()))


class RankSeedsWeights(Planted):
    """Ranks initialise from different seeds, and nobody makes them equal."""

    exchanged = ((adapter, "build_model", _from_rank_seed),)


def _relu_or_gelu(x: Tensor) -> Tensor:
    return functional.gelu(x) if dist.get_rank() else functional.relu(x)


class OtherActivationOnOtherRanks(Planted):
    """Rank 0 is built with another option than the others: their activation differs."""

    exchanged = ((models_module, "functional", SimpleNamespace(relu=_relu_or_gelu)),)


def _untied(case: Case) -> nn.Module:
    model = build_model(case)
    if case.model.tied and not case.model.lora_rank:
        head = model.get_submodule("lm_head" if case.model.is_language else "head")
        assert isinstance(head.weight, nn.Parameter)
        head.weight = nn.Parameter(head.weight.detach().clone(), head.weight.requires_grad)
    return model


class Untied(Planted):
    """Embedding and head begin with equal weights and are trained as two parameters."""

    exchanged = ((adapter, "build_model", _untied),)


def _rounded(case: Case) -> nn.Module:
    model = build_model(case)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16).to(parameter.dtype)
    return model


class LoadedThroughBf16(Planted):
    """Weights are loaded in bf16 and stored in fp32: the cast comes too late."""

    exchanged = ((adapter, "build_model", _rounded),)

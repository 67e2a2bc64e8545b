"""Plain FSDP2 on machines where ranks do not compute the bits that the controller computes.

`python -m pytest -p tests.engines.unreplayable` probes the session with `OtherKernels`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from fsdp_engine.adapters.torch_fsdp import Fsdp2Trainee, TorchFsdp2
from fsdp_engine.contract.case import Case
from fsdp_engine.contract.protocol import RankContext
from properties import probe

HERE = "tests.engines.unreplayable"


class OtherKernels(TorchFsdp2):
    """Matrix products of bfloat16 are summed in another order: right, but not to the last bit."""

    def build(self, case: Case, rank: RankContext) -> Fsdp2Trainee:
        functional.linear = _linear
        return super().build(case, rank)


_original = functional.linear


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002  torch's own name
    if input.dtype != torch.bfloat16:
        return _original(input, weight, bias)
    products = (input.unsqueeze(-2) * weight).flip(-1)
    sums = products.sum(-1)
    return sums if bias is None else sums + bias


class RaisesInDouble(TorchFsdp2):
    """A machine without double."""

    def build(self, case: Case, rank: RankContext) -> Fsdp2Trainee:
        if case.dtypes.compute == "float64":
            raise TypeError("this device has no float64")
        return super().build(case, rank)


def pytest_configure() -> None:
    probe.PROBE_ENGINE = f"{HERE}:OtherKernels"

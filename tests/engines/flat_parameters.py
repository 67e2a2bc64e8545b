"""FSDP1 without original parameters: one flat parameter per unit is all the optimizer sees."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp_engine.adapters.torch_fsdp import Fsdp1Trainee, TorchFsdp1
from fsdp_engine.contract.case import Case
from fsdp_engine.contract.protocol import RankContext
from fsdp_engine.workload.models import Block, build_model


class FlatParameters(TorchFsdp1):
    """Full sharding over all ranks, fp32 or fp64."""

    def build(self, case: Case, rank: RankContext) -> Fsdp1Trainee:
        module = FullyShardedDataParallel(
            build_model(case),
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            device_id=torch.device(rank.device),
            use_orig_params=False,
        )
        return Fsdp1Trainee(module, case, torch.device(rank.device))

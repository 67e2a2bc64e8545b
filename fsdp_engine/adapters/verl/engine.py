"""verl 0.9.1's `FSDPEngineWithLMHead` behind the protocol.

What is verl's stays verl's: configuration objects, meshes, loading, wrapping, micro-batches,
synchronisation, clipping, steps, exports, checkpoints. `docs/engines-verl.md` lists the rest.
"""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import verl
from verl.utils.model import get_hf_auto_model_class
from verl.workers.engine.fsdp import utils

from fsdp_engine.adapters.numerics import fsdp1_numerics, fsdp2_numerics
from fsdp_engine.adapters.verl import config, models
from fsdp_engine.adapters.verl.refusals import not_exported, refusal
from fsdp_engine.adapters.verl.trainee import AdaptedEngine, VerlTrainee
from fsdp_engine.adapters.verl.units import units
from fsdp_engine.contract.actions import ACTIONS, OFFLOAD_ACTIONS
from fsdp_engine.contract.case import Case, Scalar
from fsdp_engine.contract.errors import UnsupportedCase
from fsdp_engine.contract.observation import Numerics
from fsdp_engine.contract.protocol import Capabilities, RankContext
from fsdp_engine.torch_private.host_sync import host_parameters_synced
from fsdp_engine.workload.models import build_model

# Asks for every configuration that transformers has, which is imported with it: once, not a case.
get_hf_auto_model_class(models.WorkloadConfig(architectures=["WorkloadForCausalLM"]))

NOT_OFFERED = ("freeze", "unfreeze", *OFFLOAD_ACTIONS)


class Verl:
    """The engine of verl's FSDP workers."""

    def capabilities(self) -> Capabilities:
        return Capabilities(
            name="verl",
            versions={"verl": verl.__version__, "torch": torch.__version__},
            strategies=("fsdp1", "fsdp2"),
            actions=tuple(kind for kind in ACTIONS if kind not in NOT_OFFERED),
            patience=2.5,  # jagged tensors and tensor dicts: tens of milliseconds a micro-batch
            lacks=({"dtypes": "fp64"}, {"mesh": "row"}, {"kind": "frozen"}),
        )

    def supports(self, case: Case) -> str | None:
        return refusal(case)

    def numerics(self, case: Case) -> Numerics:
        """Torch's wrappers', under an autocast of the whole forward and loss below fp32.

        Deferred gradients are declared to add up in the reduce dtype, as the configuration has it.
        """
        fsdp1 = case.engine.strategy == "fsdp1"
        numerics = fsdp1_numerics(case) if fsdp1 else fsdp2_numerics(case)
        low = case.dtypes.compute != "float32"
        return dataclasses.replace(
            numerics,
            units=units(case),
            local_accumulate=case.dtypes.reduce,
            buffers="float32" if fsdp1 else None,
            input_cast=True,
            autocast=case.dtypes.compute if low else None,
            semantics="",
        )

    def defaults(self) -> dict[str, dict[str, Scalar]]:
        return {entry: config.defaults(entry) for entry in ("dataclass", "yaml")}

    def mesh_shape(self, world_size: int, fsdp_size: int) -> tuple[int, ...]:
        """What verl asks torch for; no ranks are needed to know it."""

        def asked(_: str, mesh_shape: tuple[int, ...], **__: Any) -> tuple[int, ...]:
            return tuple(mesh_shape)

        with mock.patch.object(utils, "init_device_mesh", asked):
            shape: tuple[int, ...] = utils.create_device_mesh(world_size, fsdp_size)
        return shape

    def strategy(self, mesh_ndim: int, *, zero3: bool) -> str:
        """Verl looks at nothing of a mesh but its number of dimensions."""
        mesh = SimpleNamespace(ndim=mesh_ndim)
        return str(utils.get_sharding_strategy(mesh, zero3_enable=zero3).name)

    def build(self, case: Case, rank: RankContext) -> VerlTrainee:
        """Every rank writes the case's model to a folder of its own, and verl loads it."""
        missing = not_exported(case)
        if missing is not None:
            raise UnsupportedCase(missing)
        on_host = torch.device(rank.device).type == "cpu"
        engine_config, optimizer_config = config.engine_and_optimizer(case)
        module: Any = build_model(case)
        folder = models.new_folder(rank)
        models.save_model(module, case, folder)
        adapted = bool(case.model.lora_rank)
        targets = models.adapter_targets(module) if adapted else None
        engine = AdaptedEngine(
            config.model_config(case, folder, targets),
            engine_config,
            optimizer_config,
            config.checkpoint_config(),
        )
        engine.adapter = models.adapter_weights(module)
        with host_parameters_synced() if on_host else nullcontext():
            engine.initialize()
        return VerlTrainee(engine, case, torch.device(rank.device))

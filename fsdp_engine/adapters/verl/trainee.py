"""A built verl engine on one rank."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor, nn
from verl.utils.device import get_torch_device
from verl.utils.fsdp_utils import merged_lora_context
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from fsdp_engine.adapters.plain_loop import STATE_SLOTS
from fsdp_engine.adapters.verl.batches import KEPT, Loss, padded, tensor_dict
from fsdp_engine.adapters.verl.models import fill_adapter
from fsdp_engine.contract.actions import Export
from fsdp_engine.contract.case import Case
from fsdp_engine.contract.errors import CheckpointError
from fsdp_engine.contract.protocol import LocalShard, Losses, StepResult, TokenLoss
from fsdp_engine.torch_private.accumulators import reshard
from fsdp_engine.torch_private.shards import (
    gradient_shards,
    parameter_shards,
    plain_name,
    state_shards,
    write_shards,
)
from fsdp_engine.workload.batches import LocalBatch


class AdaptedEngine(FSDPEngineWithLMHead):  # type: ignore[misc]  # verl has no types
    """verl's engine, with the case's weights in its adapter and the workload's padding.

    verl gives position 0 to all padding. Nobody looks at it, but a router does send it to experts,
    and how many rows an expert multiplies decides how sums are rounded.
    """

    adapter: dict[str, Tensor]

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict[str, Any], Any]:
        inputs, other = super().prepare_model_inputs(micro_batch)
        tokens = inputs["input_ids"]
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return {**inputs, "position_ids": positions.expand_as(tokens)}, other

    def _build_lora_module(self, module: nn.Module) -> nn.Module:
        adapted: nn.Module = super()._build_lora_module(module)
        fill_adapter(adapted, self.adapter)
        return adapted


class VerlTrainee:
    """The protocol's calls in verl's."""

    def __init__(self, engine: AdaptedEngine, case: Case, device: torch.device) -> None:
        self.engine = engine
        self.case = case
        self.device = device
        self._total = 0.0
        self._num_saved = 0

    @property
    def module(self) -> nn.Module:
        module: nn.Module = self.engine.module
        return module

    @contextmanager
    def mode(self, which: Literal["train", "eval"]) -> Iterator[None]:
        """Verl's context; it leaves the module in its mode, which is put back here."""
        before = self.module.training
        entered = self.engine.train_mode() if which == "train" else self.engine.eval_mode()
        try:
            with entered:
                yield
        finally:
            self.module.train(before)

    def zero_grad(self) -> None:
        self.engine.optimizer_zero_grad()

    def forward_backward(self, batch: LocalBatch, loss: TokenLoss) -> Losses:
        called = Loss(batch, loss, self.case.engine.loss_mode)
        self.engine.forward_backward_batch(self._data(batch), called)
        self._total = called.total
        return Losses(total=called.total, plan=tuple(called.plan))

    def gradients(self) -> Iterator[LocalShard]:
        return gradient_shards(self.module)

    def parameters(self) -> Iterator[LocalShard]:
        self._wait()
        return parameter_shards(self.module)

    def optimizer_state(self) -> Iterator[tuple[str, LocalShard]]:
        self._wait()
        slots = STATE_SLOTS[self.case.optimizer.kind]
        return state_shards(self.module, self.engine.optimizer, slots)

    def metrics(self) -> dict[str, float]:
        """The losses that verl returns of its micro-batches, averaged as its workers do."""
        total = torch.tensor(self._total, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return {"loss": total.item() / dist.get_world_size()}

    def step(self) -> StepResult:
        norm = float(self.engine.optimizer_step())
        return StepResult(norm=norm, stepped=math.isfinite(norm))

    def lr_step(self) -> float:
        return float(self.engine.lr_scheduler_step())

    def infer(self, batch: LocalBatch, loss: TokenLoss) -> Tensor:
        """One forward over all of the rank's sequences, without planning."""
        data = self._data(
            batch, use_dynamic_bsz=False, micro_batch_size_per_gpu=len(batch), force_group_size=1
        )
        called = Loss(batch, loss, self.case.engine.loss_mode)
        output = self.engine.forward_backward_batch(data, called, forward_only=True)
        return padded(output["model_output"][KEPT])

    def export(self, action: Export) -> Iterator[tuple[str, Tensor]]:
        """verl's; `force` brings the weights to the device before and off it afterwards."""
        engine = self.engine
        engine.model_config.lora["merge"] = action.weights == "merged"
        if action.staging == "force":
            engine.to(self.device.type, model=True, optimizer=False, grad=False)
        tensors, _ = engine.get_per_tensor_param(
            layered_summon=action.layered, base_sync_done=action.weights == "adapter"
        )
        return _named(tensors)

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        with self.engine.disable_adapter():
            yield

    @contextmanager
    def merge_adapter(self) -> Iterator[None]:
        """Verl's context, in which verl itself runs nothing: what a forward gathered is let go."""
        reshard(self.module)
        with merged_lora_context(self.module, backup_adapters=True):
            yield
            reshard(self.module)

    def freeze(self, names: tuple[str, ...]) -> None:
        raise NotImplementedError(names)

    def unfreeze(self, names: tuple[str, ...]) -> None:
        raise NotImplementedError(names)

    def restore(self, parameters: tuple[LocalShard, ...]) -> None:
        write_shards(self.module, parameters)

    def save(self, path: str, *, max_to_keep: int | None = None) -> None:
        self._num_saved += 1
        folder = Path(path, f"global_step_{self._num_saved}")
        self.engine.save_checkpoint(
            str(folder), global_step=self._num_saved, max_ckpt_to_keep=max_to_keep
        )

    def load(self, path: str) -> None:
        """Whatever verl raises while it loads counts as its refusal."""
        newest = max(Path(path).iterdir(), key=lambda folder: int(folder.name.rsplit("_", 1)[1]))
        try:
            self.engine.load_checkpoint(str(newest))
        except Exception as error:
            raise CheckpointError(f"{newest.name}: {error}") from error

    def _wait(self) -> None:
        """Verl offloads without waiting; who reads on the host has to, as its source says."""
        if self.device.type != "cpu":
            get_torch_device().synchronize()

    def _data(self, batch: LocalBatch, **planning: Any) -> Any:
        fields = self.engine.engine_config
        wanted = {
            "use_dynamic_bsz": fields.use_dynamic_bsz,
            "micro_batch_size_per_gpu": fields.micro_batch_size_per_gpu,
            "max_token_len_per_gpu": fields.max_token_len_per_gpu,
            "force_group_size": self.case.engine.planning.group,
        }
        return tensor_dict(
            batch, self.device, num_sequences=self._num_sequences(batch), planning=wanted | planning
        )

    def _num_sequences(self, batch: LocalBatch) -> int:
        """Of all ranks, those with loss: what verl's trainer knows of a batch before it is sent."""
        count = torch.tensor(sum(tokens > 0 for tokens in batch.loss_tokens), device=self.device)
        dist.all_reduce(count)
        return int(count.item())


def _named(tensors: Any) -> Iterator[tuple[str, Tensor]]:
    """By the workload's names: verl says `base_layer` where an adapter will be put."""
    for name, tensor in tensors:
        yield plain_name(name).replace(".base_layer", ""), tensor

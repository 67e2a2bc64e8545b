"""The engine: one wrapped model on one rank, trained by micro-batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_engine.contract.actions import Export
from fsdp_engine.contract.errors import ConfigError, EngineStateError
from fsdp_engine.contract.protocol import LocalShard, Losses, StepResult, TokenLoss
from fsdp_engine.engine import checkpoint
from fsdp_engine.engine.config import DTYPES, EngineConfig, OptimizerConfig
from fsdp_engine.engine.gradient_sync import GradientSync
from fsdp_engine.engine.mesh import make_mesh, mesh_shape, require_mesh
from fsdp_engine.engine.micro_batches import plan_batch
from fsdp_engine.engine.normalise import GlobalCounts, count, normalise
from fsdp_engine.engine.optimization import Optimization
from fsdp_engine.engine.residency import Residency
from fsdp_engine.engine.sharding import replicates
from fsdp_engine.engine.units import find_units
from fsdp_engine.engine.usage import Usage
from fsdp_engine.engine.weights import WeightPlan, Weights
from fsdp_engine.engine.wrap import wrap
from fsdp_engine.torch_private.accumulators import clear_gradients, reset, reshard
from fsdp_engine.torch_private.shards import (
    gradient_shards,
    parameter_shards,
    plain_name,
    write_shards,
)
from fsdp_engine.torch_private.trainable import set_trainable
from fsdp_engine.workload.batches import LocalBatch

ModuleArguments = Callable[[dict[str, Tensor]], dict[str, Tensor]]
"""Chooses, of a micro-batch's inputs, the keyword arguments that the model takes."""


class FsdpEngine:
    """A model, sharded over the default process group, with its optimizer and schedule.

    `model` holds its weights, the same on every rank, and is wrapped in place. `shape` overrides
    the mesh that `config.fsdp_size` names. Without `optimizer` there is no step: that is
    `forward_only`.

    Raises:
        ConfigError: before any collective, on every rank.
    """

    def __init__(
        self,
        model: nn.Module,
        config: EngineConfig,
        optimizer: OptimizerConfig | None,
        *,
        device: torch.device,
        module_arguments: ModuleArguments = dict,
        shape: tuple[int, ...] | None = None,
    ) -> None:
        world_size = dist.get_world_size()
        shape = mesh_shape(world_size, config.fsdp_size) if shape is None else shape
        require_mesh(shape, world_size=world_size)
        units = find_units(model, config.wrap_policy)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(DTYPES[config.model_dtype])
        self._config = config
        self._device = device
        self._module_arguments = module_arguments
        plan = WeightPlan.of(model, units)
        self._usage = Usage(units)
        self._unsettled = False
        self._is_used = False
        self._absent: frozenset[str] = frozenset()
        self._counts: GlobalCounts | None = None
        self._total = 0.0
        self._mesh = make_mesh(shape, world_size=world_size, device_type=device.type)
        self.module = wrap(units, config, self._mesh, device)
        self._sync = GradientSync(
            self.module,
            deferred=config.use_no_sync_for_gradient_accumulation,
            replicated=config.strategy == "fsdp" and replicates(shape),
        )
        self._optimization = (
            None
            if config.forward_only or optimizer is None
            else Optimization(self.module, optimizer, num_shards=shape[-1], device=device)
        )
        own = self._optimization
        self._residency = Residency(
            self.module, None if own is None else own.saved().optimizer, config, device
        )
        self.weights = Weights(plan, self.module, self._mesh, device, self._staged)

    @contextmanager
    def mode(self, which: Literal["train", "eval"]) -> Iterator[None]:
        """Train or evaluate inside; modes come back. An exception leaves no gradient behind.

        The model is on the device inside, for all calls there. Where it then goes to the host,
        gradients that a step has used are dropped: nobody needs their copies.
        """
        if which == "train":
            self._optimizer("train")
        before = [(module, module.training) for module in self.module.modules()]
        with self._residency.using("model"):
            self.module.train(which == "train")
            try:
                yield
            except BaseException:
                self._abandon()
                raise
            finally:
                for module, training in before:
                    module.training = training
                if self._is_used and self._residency.leaves_with_last_user("model"):
                    self.zero_grad()

    def to(
        self,
        device: torch.device | str,
        *,
        model: bool = True,
        optimizer: bool = True,
        grad: bool = True,
    ) -> None:
        """Move these to the host or to the engine's device, where they rest from now on.

        A mode, a call outside of one and a staged export still have on the device what they need,
        and bring it back to where it rests. Gradients are where their parameters are.

        Raises:
            ConfigError: another device, `grad` not as `model`, or with `offload_policy`.
            EngineStateError: inside a mode, or while a staged export is held.
        """
        if grad != model:
            raise ConfigError(
                f"to: grad={grad} with model={model} is not legal; gradients are where their "
                "parameters are"
            )
        self._residency.rest(device, model=model, optimizer=optimizer)

    def zero_grad(self) -> None:
        clear_gradients(self.module)
        self._usage.clear()
        self._unsettled = self._is_used = False
        self._absent = frozenset()

    def forward_backward(self, batch: LocalBatch, loss: TokenLoss) -> Losses:
        """Run every micro-batch and leave the batch's reduced gradients; earlier ones are dropped.

        After an exception parameters, optimizer state and sync flags are as before the batch, and
        no gradient is left, so the next batch gives what a fresh engine gives.
        """
        self._optimizer("forward_backward")
        self.weights.require_unmerged("forward_backward")
        with self._residency.using("model"):
            return self._forward_backward(batch, loss)

    def _forward_backward(self, batch: LocalBatch, loss: TokenLoss) -> Losses:
        self.zero_grad()
        try:
            plan, notes = plan_batch(batch.lengths, self._config, self._device)
            counts = self._counts = count(batch.loss_tokens, self._device)
            self._unsettled = True
            total = 0.0
            for number, indices in enumerate(plan):
                with self._sync.micro_batch(number, len(plan)):
                    share = self._share(batch, indices, loss, counts)
                    self._sync.before_backward(number, len(plan), share)
                    share.backward()  # type: ignore[no-untyped-call]  # so in torch
                self._usage.end_micro_batch()
                total += share.item()
        except BaseException:
            self._abandon()
            raise
        self._total = total
        return Losses(total=total, plan=plan, notes=notes)

    def metrics(self) -> dict[str, float]:
        """Loss and counts of the last batch over all ranks. A collective call."""
        if self._counts is None:
            return {}
        total = torch.tensor(self._total, dtype=torch.float64, device=self._device)
        dist.all_reduce(total)
        return {
            "loss": total.item() / dist.get_world_size(),
            "loss_tokens": float(self._counts.num_tokens),
            "sequences": float(self._counts.num_sequences),
        }

    def gradients(self) -> Iterator[LocalShard]:
        """This rank's shards. The first call after a batch is collective."""
        self._settle()
        for shard in gradient_shards(self.module):
            yield dataclasses.replace(shard, data=None) if shard.name in self._absent else shard

    def parameters(self) -> Iterator[LocalShard]:
        return parameter_shards(self.module)

    def optimizer_state(self) -> Iterator[tuple[str, LocalShard]]:
        """This rank's shards of the optimizer's state, by slot."""
        if self._optimization is None:
            return iter(())
        return self._optimization.state()

    def freeze(self, names: tuple[str, ...]) -> None:
        """Take no gradients for these parameters from now on; optimizer state is kept."""
        self.zero_grad()
        set_trainable(self.module, names, trainable=False)

    def unfreeze(self, names: tuple[str, ...]) -> None:
        """Train these parameters from now on."""
        self.zero_grad()
        set_trainable(self.module, names, trainable=True)

    def restore(self, parameters: tuple[LocalShard, ...]) -> None:
        """Write this rank's parts back in place; the next forward gathers them."""
        self.weights.require_unmerged("restore")
        self.weights.written()
        reshard(self.module)
        write_shards(self.module, parameters)

    def step(self) -> StepResult:
        """Clip and step, or, where any rank has a non-finite gradient, drop all gradients."""
        optimization = self._optimizer("step")
        self.weights.require_unmerged("step")
        with self._residency.using("model", "optimizer"):
            self._settle()
            result = optimization.step()
            self._is_used = result.stepped
            if result.stepped:
                self.weights.written()
            else:
                self.zero_grad()
        return result

    def lr_step(self) -> float:
        return self._optimizer("lr_step").lr_step()

    @torch.no_grad()
    def infer(self, batch: LocalBatch, loss: TokenLoss) -> Tensor:
        """Per-token losses `[sequences, longest]` of the whole batch, in one forward."""
        micro_batch = batch.select(range(len(batch))).to(self._device)
        with self._residency.using("model"):
            try:
                output = self.module(**self._module_arguments(micro_batch.inputs))
                return loss(output, micro_batch)
            except BaseException:
                self._abandon()
                raise
            finally:
                reshard(self.module)

    def export(self, action: Export) -> Iterator[tuple[str, Tensor]]:
        """Full weights by name, one at a time, in the storage dtype, on the engine's device.

        They are the weights at the call: once they are written to, by a step for example, the
        generator raises `EngineStateError` instead of going on with newer ones.

        Where the model rests on the host, a staged export has all of it on the device while it is
        drained; otherwise each tensor's parts are copied when it is their turn. Every `staging`
        yields the same. `auto` stages under FSDP1 and with an adapter, and never with
        `offload_policy`. Raises `ConfigError` where there is no such export.
        """
        return self.weights.export(action)

    def _staged(self, asked: Literal["auto", "force", "skip"]) -> AbstractContextManager[None]:
        """What holds the model on the device while an export is drained, if anything."""
        if asked == "force" and self._config.offload_policy:
            raise ConfigError(
                "export.staging: 'force' is not legal with offload_policy, which keeps the model "
                "on the host; legal is auto or skip"
            )
        suits = self._config.strategy == "fsdp" or self.weights.plan.adapter is not None
        staged = asked == "force" or (asked == "auto" and suits)
        return self._residency.using("model") if staged else nullcontext()

    def save(self, path: str | Path, *, max_to_keep: int | None = None) -> Path:
        """Write the next checkpoint below `path` and return its folder. A collective call.

        Weights, buffers, optimizer, schedule and every rank's random numbers; gradients are not in
        it. Below `path` all but the newest `max_to_keep` are removed, once the new one is on disk.

        Raises:
            ConfigError: `max_to_keep` is less than one.
            CheckpointError: it cannot be written; earlier ones are as they were.
        """
        self.weights.require_unmerged("save")
        return checkpoint.save(self._held(), Path(path), max_to_keep=max_to_keep)

    def load(self, path: str | Path) -> checkpoint.Loaded:
        """Go on from the checkpoint at `path`, or from the newest below it. A collective call.

        It may come from another mesh, number of ranks or strategy. Gradients are dropped; which
        parameters train stays. Random numbers go on where as many ranks have saved theirs.

        Raises:
            CheckpointError: it is refused, on every rank, and nothing has been touched.
        """
        self.weights.require_unmerged("load")
        ready = checkpoint.prepare(self._held(), Path(path))
        self.zero_grad()
        reshard(self.module)
        ready.write()
        self._residency.settle()
        self.weights.written()
        return ready.loaded

    def _held(self) -> checkpoint.Held:
        optimization = self._optimization
        return checkpoint.Held(
            module=self.module,
            entries=self.weights.plan.entries,
            optimization=None if optimization is None else optimization.saved(),
            device=self._device,
        )

    def disable_adapter(self) -> AbstractContextManager[None]:
        """Inside, forwards run without the adapter."""
        return self.weights.without_adapter()

    def merge_adapter(self) -> AbstractContextManager[None]:
        """Inside, forwards run with the adapter added to the weights, which come back unchanged.

        Nothing else may read or write them meanwhile. Entering is a collective call.
        """
        return self.weights.merged()

    def _share(
        self, batch: LocalBatch, indices: tuple[int, ...], loss: TokenLoss, counts: GlobalCounts
    ) -> Tensor:
        micro_batch = batch.select(indices).to(self._device)
        output = self.module(**self._module_arguments(micro_batch.inputs))
        token_losses = loss(output, micro_batch)
        return normalise(token_losses, micro_batch.loss_mask, self._config.loss_agg_mode, counts)

    def _settle(self) -> None:
        """Gradients of parameters that no rank used become absent, once per batch.

        Asked when gradients are read or stepped with, so forward and backward stay without
        collectives of their own.
        """
        if not self._unsettled:
            return
        self._absent = self._usage.unused_anywhere(self._device)
        self._unsettled = False
        for name, parameter in self.module.named_parameters():
            if plain_name(name) in self._absent:
                parameter.grad = None

    def _abandon(self) -> None:
        reset(self.module)
        self.zero_grad()

    def _optimizer(self, asked: str) -> Optimization:
        if self._optimization is None:
            raise EngineStateError(f"{asked}: not with forward_only=True, which has no optimizer")
        return self._optimization

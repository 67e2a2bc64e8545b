"""A plain training loop over a wrapped module: planning, normalising, accumulating, stepping."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from fsdp_engine.adapters.optional_units import run_the_same_units
from fsdp_engine.contract.batch import Planning, Static
from fsdp_engine.contract.case import Case, LossMode, Scalar
from fsdp_engine.contract.case import Optimizer as OptimizerOptions
from fsdp_engine.contract.errors import UnsupportedCase
from fsdp_engine.contract.protocol import LocalShard, Losses, StepResult, TokenLoss
from fsdp_engine.torch_private.shards import (
    gradient_shards,
    parameter_shards,
    plain_name,
    state_shards,
    write_shards,
)
from fsdp_engine.workload.batches import LocalBatch
from fsdp_engine.workload.models import module_arguments

Plan: TypeAlias = tuple[tuple[int, ...], ...]
"""Sequence indices per micro-batch of one rank."""

NO_ADAPTER_CONTROL = "plain torch exports the wrapped model as it is and runs it with its adapter"
"""What it has no other way for."""


STATE_SLOTS = {"sgd": (), "adamw": ("step", "exp_avg", "exp_avg_sq")}
"""What torch's optimizers keep of a parameter, by the case's names of them."""


class PlainEngine:
    """What an engine without a configuration of its own answers to questions about one."""

    def defaults(self) -> dict[str, dict[str, Scalar]]:
        return {}

    def mesh_shape(self, world_size: int, fsdp_size: int) -> tuple[int, ...]:
        """There is no option to ask for a mesh by a size."""
        raise UnsupportedCase(f"plain torch takes a mesh as it is, not {world_size}, {fsdp_size}")

    def strategy(self, mesh_ndim: int, *, zero3: bool) -> str:
        """The names of FSDP1's strategies are not the engine's own."""
        raise UnsupportedCase(f"the engine names no strategy for {mesh_ndim} axes, zero3 {zero3}")


class PlainTrainee:
    """What both wrappers share: the training loop, the optimizer, the batch's arithmetic."""

    def __init__(
        self,
        module: nn.Module,
        case: Case,
        device: torch.device,
        *,
        optimizer: Optimizer | None = None,
        schedule: LRScheduler | None = None,
    ) -> None:
        """`optimizer` and `schedule` are those of `optimizer_of` and `schedule_of` where None."""
        self.module = module
        self.case = case
        self.device = device
        self.optimizer = optimizer or optimizer_of(module, case.optimizer)
        self.schedule = schedule or schedule_of(self.optimizer, case.optimizer)
        self.counts: LossCounts | None = None
        self.total = 0.0

    @contextmanager
    def mode(self, which: Literal["train", "eval"]) -> Iterator[None]:
        before = self.module.training
        self.module.train(which == "train")
        try:
            yield
        finally:
            self.module.train(before)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def forward_backward(self, batch: LocalBatch, loss: TokenLoss) -> Losses:
        counts = self.counts = count_loss(batch, self.device)
        plan = plan_micro_batches(batch, self.case.engine.planning, self.device)
        total = 0.0
        for number, indices in enumerate(plan):
            micro_batch = batch.select(indices).to(self.device)
            synced = not self.case.engine.deferred or number == len(plan) - 1
            with self.gradient_sync(enabled=synced):
                output = self.forward(micro_batch.inputs)
                token_losses = loss(output, micro_batch)
                scaled = normalised_loss(
                    token_losses, micro_batch.loss_mask, self.case.engine.loss_mode, counts
                )
                self.backward(scaled)
            total += scaled.item()
        self.total = total
        return Losses(total=total, plan=plan)

    def forward(self, inputs: dict[str, Tensor]) -> object:
        return self.module(**module_arguments(self.case, inputs))

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]  # so in torch

    def gradient_sync(self, *, enabled: bool) -> AbstractContextManager[None]:
        raise NotImplementedError

    def clip(self, max_norm: float) -> Tensor:
        raise NotImplementedError

    def gradients(self) -> Iterator[LocalShard]:
        return gradient_shards(self.module)

    def parameters(self) -> Iterator[LocalShard]:
        return parameter_shards(self.module)

    def optimizer_state(self) -> Iterator[tuple[str, LocalShard]]:
        slots = STATE_SLOTS[self.case.optimizer.kind]
        return state_shards(self.module, self.optimizer, slots)

    def metrics(self) -> dict[str, float]:
        if self.counts is None:
            return {}
        total = torch.tensor(self.total, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return {
            "loss": total.item() / self.counts.num_ranks,
            "loss_tokens": float(self.counts.num_tokens),
            "sequences": float(self.counts.num_sequences),
        }

    def freeze(self, names: tuple[str, ...]) -> None:
        self._set_trainable(names, trainable=False)

    def unfreeze(self, names: tuple[str, ...]) -> None:
        self._set_trainable(names, trainable=True)

    def restore(self, parameters: tuple[LocalShard, ...]) -> None:
        write_shards(self.module, parameters)

    def disable_adapter(self) -> AbstractContextManager[None]:
        raise UnsupportedCase(NO_ADAPTER_CONTROL)

    def merge_adapter(self) -> AbstractContextManager[None]:
        raise UnsupportedCase(NO_ADAPTER_CONTROL)

    def _set_trainable(self, names: tuple[str, ...], *, trainable: bool) -> None:
        parameters = {plain_name(name): p for name, p in self.module.named_parameters()}
        for name in names:
            parameters[name].requires_grad_(trainable)

    def step(self) -> StepResult:
        norm = self.clip(self.case.optimizer.clip_grad).item()
        finite = math.isfinite(norm)
        if finite:
            self.optimizer.step()
        else:
            self.optimizer.zero_grad()
        return StepResult(norm=norm, stepped=finite)

    def lr_step(self) -> float:
        self.schedule.step()
        return float(self.schedule.get_last_lr()[0])

    @torch.no_grad()
    def infer(self, batch: LocalBatch, loss: TokenLoss) -> Tensor:
        everything = batch.select(range(len(batch))).to(self.device)
        return loss(self.forward(everything.inputs), everything)


def optimizer_of(module: nn.Module, options: OptimizerOptions) -> Optimizer:
    """Torch's optimizer over all of the module's parameters."""
    kind = SGD if options.kind == "sgd" else AdamW
    return kind(module.parameters(), lr=options.lr, weight_decay=options.weight_decay)


def schedule_of(optimizer: Optimizer, options: OptimizerOptions) -> LRScheduler:
    """Torch's scheduler with the case's schedule."""
    return LambdaLR(optimizer, partial(learning_rate_factor, options))


def learning_rate_factor(options: OptimizerOptions, step: int) -> float:
    """Linear warmup, then constant or a cosine that falls to `min_lr_ratio`."""
    if step < options.warmup_steps:
        return step / options.warmup_steps
    if options.schedule == "constant":
        return 1.0
    done = (step - options.warmup_steps) / max(1, options.total_steps - options.warmup_steps)
    low = options.min_lr_ratio
    return max(low, (1 + low) / 2 + (1 - low) / 2 * math.cos(math.pi * done))


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCounts:
    """Over all ranks: ranks, loss tokens, sequences that have any."""

    num_ranks: int
    num_tokens: int
    num_sequences: int


def count_loss(batch: LocalBatch, device: torch.device) -> LossCounts:
    """The global counts, by one all-reduce of two integers."""
    tokens = batch.loss_tokens
    counts = torch.tensor([sum(tokens), sum(count > 0 for count in tokens)], device=device)
    dist.all_reduce(counts)
    num_tokens, num_sequences = map(int, counts.tolist())
    return LossCounts(
        num_ranks=dist.get_world_size(), num_tokens=num_tokens, num_sequences=num_sequences
    )


def plan_micro_batches(batch: LocalBatch, planning: Planning, device: torch.device) -> Plan:
    """Sequence indices per micro-batch, the same number of micro-batches on all ranks.

    A token budget gives the largest number that any rank needs to stay within it, but not more
    than the shortest batch has groups: then some micro-batches exceed the budget.
    """
    if isinstance(planning, Static):
        return _chunks(len(batch), planning.sequences)
    groups = _group_lengths(batch.lengths, planning.group)
    needed = len(_greedy(groups, planning.max_tokens))
    agreed = torch.tensor([needed, -len(groups)], device=device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
    most_needed, minus_shortest = map(int, agreed.tolist())
    parts = _split(groups, min(most_needed, -minus_shortest), planning.max_tokens)
    return _sequences_of(parts, planning.group)


def ranks_run_the_same(case: Case) -> bool:
    """Whether the optional unit is run on all ranks or on none, in every micro-batch."""
    planning = case.engine.planning
    return run_the_same_units(case, lambda lengths: _plans_of_ranks(lengths, planning))


def _plans_of_ranks(lengths: Sequence[tuple[int, ...]], planning: Planning) -> list[Plan]:
    """What the ranks agree on in `plan_micro_batches`, from all their lengths at once."""
    if isinstance(planning, Static):
        return [_chunks(len(rank), planning.sequences) for rank in lengths]
    groups = [_group_lengths(rank, planning.group) for rank in lengths]
    needed = max(len(_greedy(rank, planning.max_tokens)) for rank in groups)
    count = min(needed, *map(len, groups))
    return [
        _sequences_of(_split(rank, count, planning.max_tokens), planning.group) for rank in groups
    ]


def _group_lengths(lengths: tuple[int, ...], size: int) -> tuple[int, ...]:
    return tuple(sum(lengths[at : at + size]) for at in range(0, len(lengths), size))


def _sequences_of(parts: Plan, size: int) -> Plan:
    """Groups of `size` sequences as the sequences that they are."""
    return tuple(tuple(at * size + k for at in part for k in range(size)) for part in parts)


def _chunks(length: int, size: int) -> Plan:
    return tuple(tuple(range(start, start + size)) for start in range(0, length, size))


def normalised_loss(
    token_losses: Tensor, loss_mask: Tensor, mode: LossMode, counts: LossCounts
) -> Tensor:
    """The micro-batch's share of the global loss, times the ranks that FSDP averages over."""
    mask = loss_mask.to(token_losses.device, token_losses.dtype)
    masked = token_losses * mask
    match mode:
        case "token-mean":
            return masked.sum() * (counts.num_ranks / counts.num_tokens)
        case "token-sum":
            return masked.sum() * float(counts.num_ranks)
        case "seq-mean-token-sum":
            return masked.sum() * (counts.num_ranks / counts.num_sequences)
        case "seq-mean-token-mean":
            per_sequence = masked.sum(-1) / mask.sum(-1).clamp(min=1)
            return per_sequence.sum() * (counts.num_ranks / counts.num_sequences)


def _greedy(lengths: tuple[int, ...], max_tokens: int) -> list[list[int]]:
    """Consecutive groups, as many as fit the budget."""
    parts: list[list[int]] = []
    room = 0
    for index, length in enumerate(lengths):
        if length > room or not parts:
            parts.append([])
            room = max_tokens
        parts[-1].append(index)
        room -= length
    return parts


def _split(lengths: tuple[int, ...], count: int, max_tokens: int) -> Plan:
    """The greedy parts, halved or merged until there are `count`, `count <= len(lengths)`."""
    parts = _greedy(lengths, max_tokens)
    while len(parts) < count:
        longest = max(range(len(parts)), key=lambda i: len(parts[i]))
        part = parts[longest]
        parts[longest : longest + 1] = [part[: len(part) // 2], part[len(part) // 2 :]]
    while len(parts) > count:
        parts[-2:] = [parts[-2] + parts[-1]]
    return tuple(map(tuple, parts))

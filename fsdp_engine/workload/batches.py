"""The data of a case: every sequence drawn from the seed and its key, padded per micro-batch.

A sequence's content depends on `(case.seed, batch index, sequence.key)` alone, so it stays the
same wherever a partition puts it. Labels are drawn, not shifted: position t has its own target.
"""

from __future__ import annotations

from collections.abc import Sequence as Indices
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdp_engine.contract.batch import Batch, Sequence
from fsdp_engine.contract.case import Case
from fsdp_engine.workload.seeds import generator


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceData:
    """One sequence as tensors.

    `inputs`: int64 `[length]` tokens, or float `[length, width]` features. `targets`: int64
    `[length]` for cross entropy, float `[length, vocab]` for the squared loss. `loss_mask`: bool
    `[length]`.
    """

    inputs: Tensor
    targets: Tensor
    loss_mask: Tensor
    gated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Sequences padded to the longest of them.

    `inputs` are the keyword arguments of the module. `targets` `[sequences, tokens, ...]`,
    `loss_mask` bool `[sequences, tokens]`, false on padding. `indices` are the sequences' places in
    the rank's batch.
    """

    inputs: dict[str, Tensor]
    targets: Tensor
    loss_mask: Tensor
    indices: tuple[int, ...]

    def to(self, device: torch.device) -> MicroBatch:
        """The same on a device."""
        return MicroBatch(
            inputs={name: tensor.to(device) for name, tensor in self.inputs.items()},
            targets=self.targets.to(device),
            loss_mask=self.loss_mask.to(device),
            indices=self.indices,
        )


class LocalBatch:
    """One rank's sequences of a global batch, on the host."""

    def __init__(self, sequences: tuple[SequenceData, ...], *, takes_tokens: bool) -> None:
        self._sequences = sequences
        self._takes_tokens = takes_tokens

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens per sequence, without padding."""
        return tuple(len(sequence.inputs) for sequence in self._sequences)

    @property
    def loss_tokens(self) -> tuple[int, ...]:
        """Tokens that carry loss, per sequence."""
        return tuple(int(sequence.loss_mask.sum()) for sequence in self._sequences)

    def select(self, indices: Indices[int]) -> MicroBatch:
        """The sequences at `indices`, in that order, padded to the longest of them."""
        chosen = [self._sequences[index] for index in indices]
        length = max(len(sequence.inputs) for sequence in chosen)
        inputs = torch.stack([_pad(sequence.inputs, length) for sequence in chosen])
        lengths = torch.tensor([len(sequence.inputs) for sequence in chosen])
        if self._takes_tokens:
            mask = (torch.arange(length)[None, :] < lengths[:, None]).long()
            arguments = {"input_ids": inputs, "attention_mask": mask}
        else:
            arguments = {"features": inputs}
        arguments["gates"] = torch.tensor([sequence.gated for sequence in chosen])
        return MicroBatch(
            inputs=arguments,
            targets=torch.stack([_pad(sequence.targets, length) for sequence in chosen]),
            loss_mask=torch.stack([_pad(sequence.loss_mask, length) for sequence in chosen]),
            indices=tuple(indices),
        )


def local_batch(case: Case, batch_index: int, rank: int) -> LocalBatch:
    """The part of batch `batch_index` that `rank` holds."""
    return _batch(case, batch_index, case.batches[batch_index].ranks[rank])


def global_batch(case: Case, batch_index: int) -> LocalBatch:
    """All sequences of batch `batch_index`, in rank order, as if one rank held them."""
    batch: Batch = case.batches[batch_index]
    return _batch(case, batch_index, batch.sequences)


def _batch(case: Case, batch_index: int, sequences: tuple[Sequence, ...]) -> LocalBatch:
    data = tuple(_sequence_data(case, batch_index, sequence) for sequence in sequences)
    return LocalBatch(data, takes_tokens=case.model.takes_tokens)


def _sequence_data(case: Case, batch_index: int, sequence: Sequence) -> SequenceData:
    gen = generator(case.seed, "batch", batch_index, sequence.key)
    vocab, length = case.model.vocab, sequence.length
    floating = torch.float64 if case.dtypes.storage == "float64" else torch.float32
    if case.model.takes_tokens:
        inputs = torch.randint(vocab, (length,), generator=gen)
    else:
        inputs = _values((length, case.model.width), gen, exact=case.exact).to(floating)
    if case.loss == "cross_entropy":
        targets = torch.randint(vocab, (length,), generator=gen)
    else:
        targets = _values((length, vocab), gen, exact=case.exact).to(floating)
    order = torch.randperm(length, generator=gen)
    loss_mask = torch.zeros(length, dtype=torch.bool)
    loss_mask[order[: sequence.loss_tokens]] = True
    return SequenceData(inputs=inputs, targets=targets, loss_mask=loss_mask, gated=sequence.gated)


def _values(shape: tuple[int, ...], gen: torch.Generator, *, exact: bool) -> Tensor:
    if exact:
        return torch.randint(-2, 3, shape, generator=gen).double()
    return torch.randn(shape, generator=gen, dtype=torch.float64)


def _pad(tensor: Tensor, length: int) -> Tensor:
    padded = torch.zeros((length, *tensor.shape[1:]), dtype=tensor.dtype)
    padded[: len(tensor)] = tensor
    return padded

"""A rank's batch as verl takes it, and the case's loss as verl calls one.

verl leaves the loss to its caller. The way in is the one its distillation uses: with
`distillation_use_topk` the function is called with the logits of a micro-batch's real tokens first,
for what is to be kept of every token, and then with what was kept, for the scalar. So the case's
own per-token loss runs in verl's own forward, and normalises by verl's own counts.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from verl.utils import tensordict_utils

from fsdp_engine.contract.case import LossMode
from fsdp_engine.contract.protocol import TokenLoss
from fsdp_engine.workload.batches import LocalBatch

KEPT = "token_loss"


def tensor_dict(
    batch: LocalBatch, device: torch.device, *, num_sequences: int, planning: dict[str, Any]
) -> TensorDict:
    """Jagged rows of tokens, positions and loss mask; features and gates as multi-modal inputs.

    `num_sequences` is the global count for losses over sequences, which verl's caller gives.
    `planning` are verl's own fields.
    """
    rows = [batch.select((index,)) for index in range(len(batch))]
    tokens = [
        row.inputs["input_ids"][0] if "input_ids" in row.inputs else torch.zeros(length).long()
        for row, length in zip(rows, batch.lengths, strict=True)
    ]
    extra = [
        {
            name: (value[0] if name == "features" else value).to(device)
            for name, value in row.inputs.items()
            if name in ("features", "gates")
        }
        for row in rows
    ]
    return tensordict_utils.get_tensordict(
        tensor_dict={
            "input_ids": _jagged(tokens),
            "position_ids": _jagged([torch.arange(length) for length in batch.lengths]),
            "loss_mask": _jagged([row.loss_mask[0] for row in rows]),
            "index": torch.arange(len(batch)),
            "multi_modal_inputs": extra,
        },
        non_tensor_dict={
            "use_remove_padding": False,
            "temperature": 1.0,
            "distillation_use_topk": True,
            "distillation_only": True,
            "global_batch_size": num_sequences,
            **planning,
        },
    )


class Loss:
    """The case's loss in verl's two calls; `plan` and `total` are what came by."""

    def __init__(self, batch: LocalBatch, loss: TokenLoss, mode: LossMode) -> None:
        self._batch = batch
        self._loss = loss
        self._mode = mode
        self.plan: list[tuple[int, ...]] = []
        self.total = 0.0

    def __call__(
        self,
        data: TensorDict,
        student_logits: Tensor | None = None,
        model_output: dict[str, Tensor] | None = None,
        dp_group: object = None,  # noqa: ARG002  verl passes it
    ) -> Any:
        if student_logits is not None:
            return {KEPT: self._per_token(student_logits[0], data)}
        assert model_output is not None
        return self._scalar(model_output[KEPT], data), {}

    def _per_token(self, logits: Tensor, data: TensorDict) -> Tensor:
        """From `[tokens, vocab]` of all sequences to their losses `[1, tokens]`."""
        indices = tuple(int(index) for index in data["index"])
        self.plan.append(indices)
        micro_batch = self._batch.select(indices).to(logits.device)
        lengths = data["input_ids"].offsets().diff().tolist()
        padded = pad_sequence(list(torch.split(logits, lengths)), batch_first=True)
        losses = self._loss(padded, micro_batch)
        return torch.cat([row[:n] for row, n in zip(losses, lengths, strict=True)])[None]

    def _scalar(self, kept: Tensor, data: TensorDict) -> Tensor:
        """The canonical association, over verl's count of tokens and its number of ranks."""
        losses = pad_sequence(list(kept.unbind()), batch_first=True)
        mask = pad_sequence(list(data["loss_mask"].unbind()), batch_first=True).to(losses.dtype)
        masked = losses * mask
        scalar = self._normalised(masked, mask, data)
        self.total += float(scalar.detach())
        return scalar

    def _normalised(self, masked: Tensor, mask: Tensor, data: TensorDict) -> Tensor:
        ranks: int = _plain(data, "dp_size")
        num_tokens: int = _plain(data, "batch_num_tokens")
        num_sequences: int = _plain(data, "global_batch_size")
        match self._mode:
            case "token-mean":
                return masked.sum() * (ranks / num_tokens)
            case "token-sum":
                return masked.sum() * ranks
            case "seq-mean-token-sum":
                return masked.sum() * (ranks / num_sequences)
            case "seq-mean-token-mean":
                means = masked.sum(1) / mask.sum(1).clamp(min=1)
                return means.sum() * (ranks / num_sequences)


def padded(kept: Tensor) -> Tensor:
    """Jagged rows as `[sequences, longest]`."""
    return pad_sequence(list(kept.unbind()), batch_first=True)


def _jagged(rows: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def _plain(data: TensorDict, name: str) -> Any:
    return tensordict_utils.get_non_tensor_data(data, name, default=None)

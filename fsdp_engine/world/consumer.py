"""Takes what an engine exports, as far as an action says, and writes it down."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress

import torch
from torch import Tensor

from fsdp_engine.contract.actions import Export, Resume
from fsdp_engine.contract.errors import EngineStateError
from fsdp_engine.contract.observation import Array, ExportedTensor
from fsdp_engine.contract.protocol import Trainee

_Tensors = Iterator[tuple[str, Tensor]]


class Consumer:
    """The consumer of one trainee's exports; it holds at most one of them.

    What it does with a tensor, which is not the engine's doing, it does inside `aside()`.
    """

    def __init__(
        self, trainee: Trainee, *, aside: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        self._trainee = trainee
        self._aside = aside
        self._held: _Tensors = iter(())

    def consume(self, action: Export | Resume) -> tuple[tuple[ExportedTensor, ...], str]:
        """What was taken, and the name of the error with which the engine refused to go on."""
        taken: list[ExportedTensor] = []
        try:
            self._take(action, taken)
        except EngineStateError as error:
            return tuple(taken), type(error).__name__
        return tuple(taken), ""

    def _take(self, action: Export | Resume, taken: list[ExportedTensor]) -> None:
        if isinstance(action, Resume):
            tensors, self._held = self._held, iter(())
            self._append(taken, tensors)
            return
        tensors = self._trainee.export(action)
        match action.drain:
            case "full":
                self._append(taken, tensors)
            case "close":
                self._append(taken, itertools.islice(tensors, action.after))
                if isinstance(tensors, Generator):
                    tensors.close()
            case "raise":
                # The export is not closed: it goes with the frame that held it.
                with suppress(_ConsumerError):
                    self._append(taken, itertools.islice(tensors, action.after))
                    raise _ConsumerError
            case "hold":
                self._append(taken, itertools.islice(tensors, action.after))
                self._held = tensors

    def _append(self, taken: list[ExportedTensor], tensors: _Tensors) -> None:
        """Keep what came before an error, too."""
        for name, tensor in tensors:
            with self._aside():
                value = as_array(tensor)
            taken.append(ExportedTensor(name=name, device=str(tensor.device), value=value))


class _ConsumerError(Exception):
    """What a consumer raises half way."""


def as_array(tensor: Tensor) -> Array:
    """A copy of a dense tensor as data."""
    plain = tensor.detach().to("cpu").contiguous()
    return Array(
        dtype=str(plain.dtype).removeprefix("torch."),
        shape=tuple(plain.shape),
        data=plain.reshape(-1).view(torch.uint8).numpy().tobytes(),
    )

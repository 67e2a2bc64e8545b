"""Work that may fail on some ranks and must then fail on all. Collective calls, every one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from fsdp_engine.contract.errors import CheckpointError

T = TypeVar("T")
_Outcome = tuple[T | None, str]


def on_first_rank(work: Callable[[], T]) -> T:
    """What the first rank's `work` returns, on every rank. Raises `CheckpointError` as it does."""
    outcome: _Outcome[T] = (None, "")
    if dist.get_rank() == 0:
        outcome = _tried(work)
    first: _Outcome[T] = gathered(outcome)[0]
    return _result(first)


def agreed(work: Callable[[], T]) -> T:
    """What this rank's `work` returns. Raises `CheckpointError` on every rank where any does."""
    own = _tried(work)
    for _, error in gathered((None, own[1])):
        if error:
            raise CheckpointError(error)
    return _result(own)


def gathered(value: Any) -> list[Any]:
    """Every rank's value, in rank order."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def share(names: list[str]) -> list[str]:
    """This rank's share of work that any rank can do."""
    return names[dist.get_rank() :: dist.get_world_size()]


def _tried(work: Callable[[], T]) -> _Outcome[T]:
    try:
        return work(), ""
    except CheckpointError as error:
        return None, str(error)
    except OSError as error:
        return None, f"{type(error).__name__}: {error}"


def _result(outcome: _Outcome[T]) -> T:
    value, error = outcome
    if error:
        raise CheckpointError(error)
    return value  # type: ignore[return-value]  # without an error it is what `work` returned

"""Work spread over processes that share one process that forks ranks."""

from __future__ import annotations

import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeVar

from fsdp_engine.world.processes import join, zygote

Task = TypeVar("Task")
Result = TypeVar("Result")


def done_in_parallel(
    work: Callable[[Task], Result], tasks: Iterable[Task], *, jobs: int
) -> Iterator[Result]:
    """The results as they come. `work` is a function of a module; it must not raise."""
    waiting = list(tasks)
    if not waiting:
        return
    # Not forked: the processes that run cases come from the zygote, which a fork would share.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        jobs, mp_context=context, initializer=_begin, initargs=(zygote().address,)
    ) as pool:
        futures = [pool.submit(work, task) for task in waiting]
        for future in as_completed(futures):
            yield future.result()


def num_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


def _begin(address: str) -> None:
    # peft reads a property that transformers has renamed
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
    join(address)

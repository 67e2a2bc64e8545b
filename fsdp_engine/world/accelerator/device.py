"""Making the device known to torch: `torch.hpu`, with what FSDP and engines ask of a device module.

Checked on torch 2.13. The device takes torch's name `hpu`, see `native/device.cpp`.
"""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch

from fsdp_engine.contract.errors import AcceleratorError
from fsdp_engine.world.accelerator import build
from fsdp_engine.world.accelerator.ledger import Ledger

DEVICE_TYPE = "hpu"


class Stream(torch.Stream):
    """A stream of the device, a new one at every call."""

    def __new__(cls, device: object = None, priority: int = 0, **known: Any) -> Self:  # noqa: ARG004  there is one device
        if known:
            return super().__new__(cls, **known)
        return super().__new__(cls, device=DEVICE_TYPE, priority=priority)


class Event(torch.Event):
    """An event of the device; `record` returns the event, as those of other devices do."""

    def __new__(cls, *_: object, **__: object) -> Self:
        return super().__new__(cls, device=DEVICE_TYPE)

    def record(self, stream: torch.Stream | None = None) -> Self:  # type: ignore[override]
        super().record(stream if stream is not None else current_stream())
        return self


def current_stream(device: object = None) -> torch.Stream:  # noqa: ARG001  there is one device
    """The stream that operators of this thread run on."""
    return torch.accelerator.current_stream()


class Accelerator:
    """The device of this process: its ledger, and its memory in bytes."""

    def __init__(self, extension: Any) -> None:
        self._extension = extension
        self.ledger = Ledger(extension)

    @property
    def memory_allocated(self) -> int:
        """Bytes that tensors hold now."""
        return int(self._extension.memory_allocated())

    @property
    def max_memory_allocated(self) -> int:
        """The most bytes held at once since `reset_peak`."""
        return int(self._extension.max_memory_allocated())

    def reset_peak(self) -> None:
        """Count the peak from what is held now."""
        self._extension.reset_peak_memory()

    @property
    def capacity(self) -> int | None:
        """Bytes the device has; None: as many as the host gives."""
        return int(self._extension.capacity()) or None

    @contextmanager
    def scheduled(self, seed: int) -> Iterator[list[str]]:
        """Be asynchronous inside: what does not wait for other work finds poison, or luck.

        Under seed 0 nothing happens before something waits for it. Under any other some things do,
        as on a device that is fast by chance. The list has what was used out of order, once the
        context has ended. `native/order.h` says what is ordered after what.
        """
        races: list[str] = []
        self._extension.start_schedule(seed)
        try:
            yield races
        finally:
            races += self._extension.stop_schedule()

    @contextmanager
    def limited(self, num_bytes: int) -> Iterator[None]:
        """Give the device so many bytes inside; beyond them is torch's `OutOfMemoryError`."""
        assert num_bytes > 0
        before = self.capacity
        self._extension.set_capacity(num_bytes)
        try:
            yield
        finally:
            self._extension.set_capacity(before or 0)


@functools.cache
def install() -> Accelerator:
    """Make the device known to torch in this process, for good; a second call changes nothing.

    Raises:
        AcceleratorError: the process sees a real device, torch is built for one, or the extension
            cannot be built.
    """
    if hasattr(torch, DEVICE_TYPE):
        raise AcceleratorError("this process has a real hpu: the simulated one would hide it")
    for kind in (torch.cuda, torch.xpu, torch.mps):
        if kind.is_available():
            raise AcceleratorError(
                f"this process sees a real device ({kind.__name__}); start it where none is visible"
            )
    for built_for in ("cuda", "hip", "xpu"):
        if getattr(torch.version, built_for, None):
            raise AcceleratorError(
                f"torch {torch.__version__} is built for {built_for} and lets no other accelerator "
                "stand beside it, visible or not; the simulated one needs a build for the CPU alone"
            )
    accelerator = Accelerator(build.load())
    module = _module(accelerator)
    torch._register_device_module(DEVICE_TYPE, module)  # type: ignore[no-untyped-call]  # so in torch
    if not torch.accelerator.is_available():
        # torch asks once and remembers.
        raise AcceleratorError(
            "this process has asked torch for its accelerator before the simulated one was there; "
            "install it first"
        )
    _add_streams(module)
    return accelerator


def _module(accelerator: Accelerator) -> Any:
    module: Any = types.ModuleType(f"torch.{DEVICE_TYPE}")
    _add_device(module)
    _add_memory(module, accelerator)
    _add_random(module)
    return module


def _add_device(module: Any) -> None:
    @contextmanager
    def device(_: object) -> Iterator[None]:
        yield

    module.device = device
    module.is_available = module.is_initialized = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = lambda _=None: None
    module.synchronize = lambda _=None: torch.accelerator.synchronize()
    module.init = module._lazy_init = lambda: None
    module._is_in_bad_fork = lambda: False
    module.get_device_name = lambda _=None: "simulated accelerator"
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.is_bf16_supported = lambda: True


def _add_streams(module: Any) -> None:
    @contextmanager
    def stream(entered: torch.Stream | None) -> Iterator[None]:
        if entered is None:
            yield
            return
        before = current_stream()
        torch.accelerator.set_stream(entered)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)

    first = current_stream()
    module.Stream, module.Event = Stream, Event
    module.default_stream = lambda _=None: first
    module.stream, module.current_stream = stream, current_stream
    module.set_stream = torch.accelerator.set_stream


def _add_memory(module: Any, accelerator: Accelerator) -> None:
    def mem_get_info(_: object = None) -> tuple[int, int]:
        """Free and total bytes."""
        host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        total = accelerator.capacity or host
        return total - accelerator.memory_allocated, total

    def memory_stats(_: object = None) -> dict[str, int]:
        return {
            "allocated_bytes.all.current": accelerator.memory_allocated,
            "allocated_bytes.all.peak": accelerator.max_memory_allocated,
            "reserved_bytes.all.current": accelerator.memory_allocated,
            "reserved_bytes.all.peak": accelerator.max_memory_allocated,
        }

    module.memory_allocated = module.memory_reserved = lambda _=None: accelerator.memory_allocated
    module.max_memory_allocated = module.max_memory_reserved = lambda _=None: (
        accelerator.max_memory_allocated
    )
    module.reset_peak_memory_stats = lambda _=None: accelerator.reset_peak()
    module.mem_get_info = mem_get_info
    module.memory_stats = memory_stats
    module.empty_cache = lambda: None  # nothing is kept that no tensor holds


def _add_random(module: Any) -> None:
    """The device draws from the host's generator, so the numbers are those of the CPU."""
    module.manual_seed = module.manual_seed_all = lambda _: None  # `torch.manual_seed` has done it
    module.initial_seed = torch.initial_seed
    module.get_rng_state = lambda _=None: torch.get_rng_state()
    module.set_rng_state = lambda state, _=None: torch.set_rng_state(state)

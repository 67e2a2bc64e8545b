"""What ranks compute on. The rest of the world, the recorder and the oracles know no other device.

A device is made ready once, in the process that ranks are forked from, before anything asks torch
which accelerator there is.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias

from fsdp_engine.contract.observation import Copy
from fsdp_engine.contract.protocol import DEVICES
from fsdp_engine.world.accelerator import device as accelerator
from fsdp_engine.world.accelerator.ledger import Copy as LedgerCopy

Where: TypeAlias = "tuple[str, int]"
"""Phase and micro-batch of a copy."""


class Device:
    """The host itself: nothing to copy to, nothing to wait for, no memory of its own.

    `torch_name` is torch's, with an index where there is one; `backend` is what
    `init_process_group` takes.
    """

    torch_name = "cpu"
    backend = "gloo"

    def memory(self) -> int:
        """Bytes that tensors hold on the device now."""
        return 0

    def take_peak(self) -> int:
        """The most bytes held at once since the last call."""
        return 0

    def take_copies(self) -> tuple[Copy, ...]:
        """The copies since the last call that `where` gave a place."""
        return ()

    def placing(self, where: Callable[[], Where | None]) -> AbstractContextManager[None]:  # noqa: ARG002  no copies
        """Ask `where` of every copy inside; None: it is not the engine's."""
        return nullcontext()

    def scheduled(self, seed: int) -> AbstractContextManager[list[str]]:  # noqa: ARG002  nothing to schedule
        """Be asynchronous inside; the list has what was used out of order, afterwards."""
        return nullcontext([])


class Simulated(Device):
    """The simulated accelerator. Raises `AcceleratorError` where it cannot be had."""

    torch_name = f"{accelerator.DEVICE_TYPE}:0"
    backend = f"cpu:gloo,{accelerator.DEVICE_TYPE}:gloo"

    def __init__(self) -> None:
        self._accelerator = accelerator.install()
        from fsdp_engine.torch_private.streams import record_streams_of  # noqa: PLC0415  see below

        # Imported when the device is there: FSDP may ask torch which accelerator it has.
        record_streams_of(accelerator.DEVICE_TYPE)

    def memory(self) -> int:
        return self._accelerator.memory_allocated

    def take_peak(self) -> int:
        peak = self._accelerator.max_memory_allocated
        self._accelerator.reset_peak()
        return peak

    def take_copies(self) -> tuple[Copy, ...]:
        copies = self._accelerator.ledger.take()
        return tuple(_placed(copy) for copy in copies if copy.label)

    def placing(self, where: Callable[[], Where | None]) -> AbstractContextManager[None]:
        def label() -> str:
            place = where()
            return "" if place is None else f"{place[0]} {place[1]}"

        return self._accelerator.ledger.labelled(label)

    def scheduled(self, seed: int) -> AbstractContextManager[list[str]]:
        return self._accelerator.scheduled(seed)


def prepare(name: str) -> Device:
    """The device of this name, made known to torch in this process.

    Raises:
        AcceleratorError: the simulated accelerator cannot be built or would hide a real one.
    """
    assert name in DEVICES, name
    return Simulated() if name == "sim" else Device()


def _placed(copy: LedgerCopy) -> Copy:
    phase, micro_batch = copy.label.split()
    return Copy(
        direction=copy.direction,
        num_bytes=copy.num_bytes,
        blocking=copy.blocking,
        implicit=copy.implicit,
        phase=phase,  # type: ignore[arg-type]  # written by `label` above
        micro_batch=int(micro_batch),
    )

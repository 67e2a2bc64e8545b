"""What ranks compute on. The rest of the world, the recorder and the oracles know no other device.

A device is made ready once, in the process that ranks are forked from, before anything asks torch
which accelerator there is. Nothing is computed there on a GPU: a process that has used CUDA cannot
fork others that do.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TypeAlias

import torch

from fsdp_engine.contract.errors import AcceleratorError
from fsdp_engine.contract.observation import Copy, Level, Numerics
from fsdp_engine.contract.protocol import DEVICES
from fsdp_engine.world.accelerator import device as accelerator
from fsdp_engine.world.accelerator.ledger import Copy as LedgerCopy

Where: TypeAlias = "tuple[str, int]"
"""Phase and micro-batch of a copy."""

_NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}

ENVIRONMENTS: dict[str, dict[str, str]] = {
    "cpu": _NO_GPU,
    "sim": _NO_GPU,
    # Libraries that ask whether there is a GPU, while they are imported, must not wake it.
    "cuda": {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
}
"""By device, what the process that ranks are forked from is started with."""


class Device:
    """The host itself: nothing to copy to, nothing to wait for, no memory of its own."""

    def torch_name(self, rank: int) -> str:  # noqa: ARG002  all ranks have the same
        """What torch calls a rank's device, with an index where there is one."""
        return "cpu"

    def backend(self, world_size: int) -> str:  # noqa: ARG002
        """What `init_process_group` takes."""
        return "gloo"

    def numerics(self, declared: Numerics, world_size: int) -> Numerics:  # noqa: ARG002
        """The engine's precision contract, with what this device and its backend do to it."""
        return declared

    def enter(self, rank: int) -> None:
        """Take a rank's place, in its own process. Raises `AcceleratorError`."""

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

    def torch_name(self, rank: int) -> str:  # noqa: ARG002  there is one
        return f"{accelerator.DEVICE_TYPE}:0"

    def backend(self, world_size: int) -> str:  # noqa: ARG002
        return f"cpu:gloo,{accelerator.DEVICE_TYPE}:gloo"

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


class Cuda(Device):
    """The GPUs of this machine: rank r takes GPU r modulo their number.

    Ranks with a GPU each talk by NCCL. NCCL refuses ranks that share one, so those use gloo. Copies
    are not counted and nothing is scheduled here: that is what the simulated device is for.
    """

    def __init__(self) -> None:
        self._num_gpus = num_gpus()

    def torch_name(self, rank: int) -> str:
        return f"cuda:{rank % self._num_gpus}"

    def backend(self, world_size: int) -> str:
        return f"cpu:gloo,cuda:{'nccl' if self._has_own(world_size) else 'gloo'}"

    def numerics(self, declared: Numerics, world_size: int) -> Numerics:
        levels = declared.levels
        if self._has_own(world_size):
            levels = tuple(map(_by_nccl, levels))
        return replace(declared, levels=levels, device=self.torch_name(0))

    def enter(self, rank: int) -> None:
        name = self.torch_name(rank)
        try:
            torch.cuda.set_device(name)
            # Context, cuBLAS and its workspace are there before the first case's clock runs.
            square = torch.ones(2, 2, device=name)
            torch.mm(square, square).cpu()
        except RuntimeError as error:
            raise AcceleratorError(f"rank {rank} cannot use {name}: {error}") from error

    def memory(self) -> int:
        return int(torch.cuda.memory_allocated())

    def take_peak(self) -> int:
        peak = int(torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()
        return peak

    def _has_own(self, world_size: int) -> bool:
        """Whether every rank has a GPU to itself; a job's machines are all alike."""
        on_one = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        return min(on_one, world_size) <= self._num_gpus


def _by_nccl(level: Level) -> Level:
    """NCCL averages by multiplying with the inverse beforehand, where gloo divides the sum.

    And its kernels may add 16-bit numbers in float32. Source: NCCL 2.27, `src/enqueue.cc`,
    `hostToDevRedOp` (`ncclAvg` is a `PreMulSum` for floating types).
    """
    averages = level.before == 1.0 and level.after == level.size
    before, after = (level.after, 1.0) if averages else (level.before, level.after)
    return replace(level, before=before, after=after, fused=True)


def num_gpus() -> int:
    """How many GPUs this process may use; counted by the driver's tools, without waking CUDA."""
    return torch.cuda.device_count()


def settle(name: str) -> None:
    """Let this process compute as the ranks on a device do, for whoever replays what they did.

    Deterministic kernels where there are any, and fp32 as it is written. CUDA is not woken by it.

    Raises:
        AcceleratorError: there is no such device on this machine.
    """
    assert name in DEVICES, name
    if name != "cuda":
        return
    if not num_gpus():
        others = " and ".join(other for other in DEVICES if other != "cuda")
        raise AcceleratorError(
            f"torch {torch.__version__} sees no GPU on this machine; legal here are {others}"
        )
    os.environ.update(ENVIRONMENTS["cuda"])
    # Where there is no deterministic kernel torch says so, and replay measures what it costs.
    torch.set_deterministic_debug_mode("warn")
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = False
    matmul = torch.backends.cuda.matmul
    matmul.allow_tf32 = False
    matmul.allow_fp16_reduced_precision_reduction = False
    matmul.allow_bf16_reduced_precision_reduction = False


def prepare(name: str) -> Device:
    """The device of this name, made known to torch in this process.

    Raises:
        AcceleratorError: there is none on this machine, or the simulated one cannot be built or
            would hide a real one.
    """
    settle(name)
    match name:
        case "sim":
            return Simulated()
        case "cuda":
            return Cuda()
        case _:
            return Device()


def check_asleep() -> None:
    """Before the first fork. Raises `AcceleratorError` where something has woken CUDA."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's own
        raise AcceleratorError(
            "CUDA is in use in the process that ranks are forked from: something that it imports "
            "uses the GPU at once, and no rank could"
        )


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

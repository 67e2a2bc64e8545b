"""Records what an engine does on one rank: every collective, and what is held between passes.

Collectives are caught where every path to a backend passes (Python calls, functional collectives,
calls from C++), so no engine needs to cooperate. Each also leaves a line in an append-only log,
which says where a rank was when it hung.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor, nn

from fsdp_engine.contract.case import Mesh
from fsdp_engine.contract.observation import (
    Axis,
    Collective,
    Copy,
    Operation,
    Phase,
    Residency,
)
from fsdp_engine.torch_private.autograd import (
    Kernel,
    at_end_of_backward,
    differentiable,
    hook_gradient,
    in_backward,
    intercept,
)
from fsdp_engine.torch_private.retained import Units
from fsdp_engine.world.collective_log import CollectiveLog
from fsdp_engine.world.device import Device

_OPERATIONS: dict[str, tuple[Operation, str]] = {
    "allgather_": ("all_gather", "output_tensors"),
    "_allgather_base_": ("all_gather", "output_tensor"),
    "allgather_coalesced_": ("all_gather", "output_lists"),
    "allgather_into_tensor_coalesced_": ("all_gather", "outputs"),
    "reduce_scatter_": ("reduce_scatter", "input_tensors"),
    "_reduce_scatter_base_": ("reduce_scatter", "input_tensor"),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", "inputs"),
    "allreduce_": ("all_reduce", "tensors"),
    "allreduce_coalesced_": ("all_reduce", "tensors"),
    "broadcast_": ("broadcast", "tensors"),
    "reduce_": ("other", "tensors"),
    "gather_": ("other", "input_tensors"),
    "scatter_": ("other", "output_tensors"),
    "alltoall_": ("other", "input_tensors"),
    "alltoall_base_": ("other", "input"),
    "send": ("other", "tensors"),
    "recv_": ("other", "tensors"),
    "recv_any_source_": ("other", "tensors"),
    "barrier": ("other", ""),
}
"""c10d operator to the operation it is and the argument that holds what is communicated whole."""


class Recorder:
    """One rank's record of one case.

    `phase` is what the driver says is going on; forward and backward are told apart within an
    action by hooks on the module and by autograd itself.
    """

    def __init__(self, mesh: Mesh, rank: int, log: CollectiveLog, device: Device) -> None:
        self.phase: Phase = "build"
        self.rank = rank
        self._axes = _axes(mesh, rank)
        self._log = log
        self._device = device
        device.take_peak()
        self._elsewhere = device.memory()
        self._collectives: list[Collective] = []
        self._residency: list[Residency] = []
        self._units: Units | None = None
        self._num_forwards = 0
        self._in_forward = False
        self._after_backward = False
        self._in_pass = False
        self.num_collectives = 0

    def move(self, mesh: Mesh) -> None:
        """Go on with a module on another mesh of the same ranks."""
        self._axes = _axes(mesh, self.rank)

    def take_copies(self) -> tuple[Copy, ...]:
        """The engine's own copies since the last call: those of its phases, not the driver's."""
        return self._device.take_copies()

    def device_bytes(self) -> int:
        """What the device holds now beyond what it held before this case."""
        return self._device.memory() - self._elsewhere

    def place(self) -> tuple[str, int] | None:
        """Phase and micro-batch of what the engine does now; None where it is the driver's turn.

        What is done between the passes belongs to the action's own phase, not to the pass before.
        """
        if self.phase in ("build", "other"):
            return None
        return self._pass() or self.phase, self._num_forwards - 1

    def take(self) -> tuple[tuple[Collective, ...], tuple[Residency, ...]]:
        """What was recorded since the last call."""
        taken = tuple(self._collectives), tuple(self._residency)
        self._collectives, self._residency = [], []
        self._num_forwards = 0
        self._units = None  # an action may have wrapped the module anew
        return taken

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Outside forward and backward collectives belong to `phase`; `plan` ends there."""
        before, self.phase = self.phase, phase
        self._in_pass = phase == "plan"
        if self._in_pass:
            self._device.take_peak()  # what was done before is no pass's
        self._after_backward = False
        try:
            yield
        finally:
            self.phase = before
            self._in_pass = self._after_backward = False

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """Tell forward from backward by hooks on the wrapped root."""

        def before(_module: nn.Module, _arguments: object) -> None:
            self._in_forward, self._after_backward = True, False
            self._num_forwards += 1

        def after(root: nn.Module, _arguments: object, output: object) -> None:
            self._in_forward = False
            if output is None or not self._in_pass:
                return
            tensor = next(differentiable(output), None)
            self._sample("after_forward", root)
            if tensor is not None:
                hook_gradient(tensor, lambda: self._enter_backward(root))

        handles = [
            module.register_forward_pre_hook(before, prepend=True),
            module.register_forward_hook(after, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def saw(self, name: str, arguments: dict[str, Any]) -> None:
        """Record one collective that is about to be issued."""
        operation, whole = _OPERATIONS[name]
        tensors = list(_tensors(arguments.get(whole)))
        group = dist.ProcessGroup.unbox(arguments["process_group"])
        ranks = frozenset(dist.get_process_group_ranks(group))
        collective = Collective(
            operation=operation,
            axis=self._axis(ranks, operation),
            group_size=len(ranks),
            dtype=str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
            elements=sum(tensor.numel() for tensor in tensors),
            phase=self._now(),
            micro_batch=self._num_forwards - 1,
            reduce_op=_reduce_op(arguments),
        )
        self._collectives.append(collective)
        self._log.issued(self.num_collectives, collective)
        self.num_collectives += 1

    def finished(self, number: int) -> None:
        """Note that the backend has finished a collective."""
        self._log.finished(number)

    def _pass(self) -> Literal["forward", "backward"] | None:
        """The pass that is running."""
        if in_backward() and self._num_forwards:
            return "backward"
        return "forward" if self._in_forward else None

    def _now(self) -> Phase:
        running = self._pass()
        if running is not None:
            return running
        if self._after_backward:
            return "backward"
        return "other" if self._in_pass and self._num_forwards else self.phase

    def _enter_backward(self, root: nn.Module) -> None:
        self._after_backward = True
        at_end_of_backward(lambda: self._sample("after_backward", root))

    def _sample(self, moment: Literal["after_forward", "after_backward"], root: nn.Module) -> None:
        if self._units is None:
            self._units = Units(root)
        held = self._units.retained()
        self._residency.append(
            Residency(
                moment=moment,
                micro_batch=self._num_forwards - 1,
                unsharded=held.unsharded,
                retained_gradient_bytes=held.gradient_bytes,
                retained_parameter_bytes=held.parameter_bytes,
                device_bytes=self.device_bytes(),
                device_peak=self._device.take_peak() - self._elsewhere,
            )
        )

    def _axis(self, ranks: frozenset[int], operation: Operation) -> Axis:
        fitting = [axis for axis, members in self._axes.items() if members == ranks]
        if operation == "all_reduce" and "replicate" in fitting:
            return "replicate"  # on a (1, 1) mesh both axes have the same ranks
        if fitting:
            return fitting[0]
        return "self" if len(ranks) == 1 else "other"


class Tap:
    """Catches every collective of this process; `listener` is the record of the current case."""

    def __init__(self) -> None:
        self.listener: Recorder | None = None
        self._last: tuple[Recorder, int, Any] | None = None
        self._interception = intercept({name: self._kernel(name) for name in _OPERATIONS})

    @contextmanager
    def listening(self, recorder: Recorder) -> Iterator[None]:
        """Tell `recorder` of every collective inside."""
        self.listener = recorder
        try:
            yield
        finally:
            self.listener = self._last = None

    def close_last(self) -> None:
        """Note in the log whether the last collective has finished."""
        if self._last is not None:
            recorder, number, work = self._last
            if work.is_completed():
                recorder.finished(number)
                self._last = None

    def _kernel(self, name: str) -> Kernel:
        def kernel(call: Callable[[], Any], arguments: dict[str, Any]) -> Any:
            recorder = self.listener
            if recorder is None:
                return call()
            self.close_last()
            number = recorder.num_collectives
            recorder.saw(name, arguments)
            result = call()
            boxed = result[-1] if isinstance(result, tuple) else result
            self._last = (recorder, number, dist.Work.unbox(boxed))
            return result

        return kernel


def _axes(mesh: Mesh, rank: int) -> dict[Axis, frozenset[int]]:
    """The ranks of each axis through `rank`; ranks are numbered row by row."""
    everyone = frozenset(range(mesh.world_size))
    replica = rank // mesh.shards
    axes: dict[Axis, frozenset[int]] = {
        "shard": frozenset(range(replica * mesh.shards, (replica + 1) * mesh.shards))
    }
    if mesh.ndim == 2:
        axes["replicate"] = frozenset(range(rank % mesh.shards, mesh.world_size, mesh.shards))
    return axes | {"world": everyone}


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _reduce_op(arguments: dict[str, Any]) -> str:
    boxed = arguments.get("reduce_op")
    return "" if boxed is None else str(dist.ReduceOp.RedOpType(boxed.op()).name).lower()

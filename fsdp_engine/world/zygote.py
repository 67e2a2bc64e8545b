"""The process that ranks are forked from: it has imported what a case imports, and never runs one.

Forking it costs milliseconds where starting Python and torch costs seconds. Requests come over a
socket with the rank's own two sockets attached; exits go back. Ranks are its children: it ends them
all and removes their directories when the controller is gone.

A controller that shares its work with other processes lets them connect to `address`: each
connection gets a fork of the zygote to itself, which costs milliseconds as well.

Run as `python -m fsdp_engine.world.zygote FD ADDRESS DEVICE`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import json
import os
import select
import shutil
import signal
import socket
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any, NoReturn, get_args

from fsdp_engine.contract.errors import AcceleratorError
from fsdp_engine.contract.model import Family, Model
from fsdp_engine.workload.models import parameter_names
from fsdp_engine.world.device import Device, check_asleep
from fsdp_engine.world.device import prepare as prepare_device
from fsdp_engine.world.paths import output_path
from fsdp_engine.world.processes import die_with_parent
from fsdp_engine.world.rank import Wires, prepare, serve
from fsdp_engine.world.recorder import Tap
from fsdp_engine.world.registry import BUILT_IN, OPTIONAL

PRELOAD = (
    *(path.partition(":")[0] for path in BUILT_IN.values()),
    "torch._dynamo",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.mixtral.modeling_mixtral",
    "peft",
)
"""Everything a case imports, found by comparing `sys.modules` before and after one."""

BRANCH_END_S = 2.0
"""How long forks of the zygote get to clean up after their controllers."""


def main(control_fd: int, address: str, device_name: str) -> None:
    """Serve fork requests until the controller closes its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the controller decides; ranks end with it
    try:
        device = prepare_all(device_name)
    except AcceleratorError as error:
        _tell(socket.socket(fileno=control_fd), {"refused": str(error)})
        return
    gc.collect()
    gc.freeze()  # a collection in a rank need not look at any of this
    tap = prepare()
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen()
            _Nursery(socket.socket(fileno=control_fd), tap, device, listener).live()
    finally:
        shutil.rmtree(Path(address).parent, ignore_errors=True)


def prepare_all(device_name: str) -> Device:
    """The device, and everything imported and built once that a case needs.

    Raises:
        AcceleratorError: the device cannot be had, or not by forks of this process.
    """
    # Before anything that is imported asks torch for its accelerator.
    device = prepare_device(device_name)
    for name in (*PRELOAD, *_of_installed_engines()):
        importlib.import_module(name)
    _warm_up()
    check_asleep()
    return device


def _of_installed_engines() -> list[str]:
    """The adapter to verl where it is installed: importing it takes seconds."""
    if importlib.util.find_spec("verl") is None:
        return []
    return [OPTIONAL["verl"].partition(":")[0]]


def _warm_up() -> None:
    """Build a small model of every family once, for what is imported and compiled on first use."""
    with warnings.catch_warnings():
        # peft reads a property that transformers has renamed
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`")
        for family in get_args(Family):
            parameter_names(Model(family=family, lora_rank=1))


class _Nursery:
    """Forks ranks for one controller and reports their exits.

    With a `listener` it also forks a nursery for everyone who connects there.
    """

    def __init__(
        self,
        control: socket.socket,
        tap: Tap,
        device: Device,
        listener: socket.socket | None = None,
    ) -> None:
        self._tap = tap
        self._device = device
        self._control = control
        self._listener = listener
        self._directories: set[str] = set()
        self._children: set[int] = set()
        self._branches: set[int] = set()
        self._wakeup_r, self._wakeup_w = os.pipe()
        os.set_blocking(self._wakeup_w, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup_w, warn_on_full_buffer=False)

    def live(self) -> None:
        """Say ready, serve until the controller is gone, leave no process and no directory."""
        try:
            _tell(self._control, {"ready": os.getpid()})
            self._serve()
        finally:
            self._end()

    def _serve(self) -> None:
        watched = [self._control.fileno(), self._wakeup_r]
        if self._listener is not None:
            watched.append(self._listener.fileno())
        while True:
            readable, _, _ = select.select(watched, [], [])
            if self._wakeup_r in readable:
                os.read(self._wakeup_r, 4096)
                self._report_exits()
            if self._listener is not None and self._listener.fileno() in readable:
                self._branch(self._listener.accept()[0])
            if self._control.fileno() in readable:
                try:
                    message, fds, _, _ = socket.recv_fds(self._control, 1 << 16, 2)
                except OSError:
                    return  # the controller is gone with answers unread
                if not message:
                    return
                for line in message.splitlines():
                    self._obey(json.loads(line), fds)

    def _branch(self, control: socket.socket) -> None:
        """Fork a nursery for another controller; it ends with that one, and with this zygote."""
        pid = self._child()
        if pid == 0:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # for the clean-up in `live`
            try:
                _Nursery(control, self._tap, self._device).live()
            finally:
                os._exit(0)
        control.close()
        self._branches.add(pid)

    def _child(self) -> int:
        """Fork; the child has let go of everything that is this nursery's."""
        zygote = os.getpid()
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            die_with_parent(zygote)
            os.close(self._wakeup_r)
            os.close(self._wakeup_w)
            self._control.close()
            if self._listener is not None:
                self._listener.close()
        return pid

    def _end(self) -> None:
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)
        for pid in self._branches:
            os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + BRANCH_END_S
        while self._branches and time.monotonic() < deadline:
            select.select([self._wakeup_r], [], [], deadline - time.monotonic())
            self._branches = {pid for pid in self._branches if os.waitpid(pid, os.WNOHANG)[0] == 0}
        for pid in self._branches:
            os.kill(pid, signal.SIGKILL)
        for directory in self._directories:
            shutil.rmtree(directory, ignore_errors=True)

    def _obey(self, request: dict[str, Any], fds: list[int]) -> None:
        if "end" in request:
            # A pid that is no child any more may be somebody else's by now.
            for pid in self._children.intersection(request["end"]):
                os.kill(pid, signal.SIGKILL)
            return
        self._fork(request, fds)

    def _fork(self, request: dict[str, Any], fds: list[int]) -> None:
        self._directories = {path for path in self._directories if Path(path).exists()}
        self._directories.add(request["directory"])
        pid = self._child()
        if pid == 0:
            _be_rank(request, fds, self._tap, self._device)
        for fd in fds:
            os.close(fd)
        self._children.add(pid)
        _tell(self._control, {"forked": pid})

    def _report_exits(self) -> None:
        while self._children or self._branches:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            if pid in self._branches:
                self._branches.discard(pid)
                continue
            self._children.discard(pid)
            with contextlib.suppress(OSError):  # the controller is gone; `_serve` sees it next
                _tell(self._control, {"exited": pid, "code": os.waitstatus_to_exitcode(status)})


def _be_rank(request: dict[str, Any], fds: list[int], tap: Tap, device: Device) -> NoReturn:
    """Serve as a rank in this fresh child; what it prints goes to a file of its own."""
    directory, rank = Path(request["directory"]), int(request["rank"])
    code = 1
    try:
        output = os.open(
            output_path(directory, rank), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600
        )
        os.dup2(output, 1)
        os.dup2(output, 2)
        commands, life = (socket.socket(fileno=fd) for fd in fds)
        wires = Wires(commands=commands, life=life)
        serve(
            wires,
            directory=directory,
            rank=rank,
            engine_name=request["engine"],
            tap=tap,
            device=device,
        )
        code = 0
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _tell(control: socket.socket, message: dict[str, int] | dict[str, str]) -> None:
    control.sendall(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])

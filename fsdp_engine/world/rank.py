"""One rank process: import the engine, say Ready, serve commands until Stop.

Imports nothing of the pool. It ends with its controller: a watcher thread waits on a socket whose
other end only the controller has, and answers there what a controller asks of a hung rank.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import socket
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import BinaryIO, NoReturn

import torch
import torch.distributed as dist

from fsdp_engine.contract.actions import ABILITIES, ability_for
from fsdp_engine.contract.case import Case
from fsdp_engine.contract.errors import UnsupportedCase
from fsdp_engine.contract.observation import RankObservation
from fsdp_engine.contract.protocol import Answer, Engine, EngineTables, RankContext
from fsdp_engine.torch_private.caches import forget_meshes
from fsdp_engine.world import wire
from fsdp_engine.world.collective_log import CollectiveLog
from fsdp_engine.world.device import Device
from fsdp_engine.world.driver import drive
from fsdp_engine.world.paths import REPORT, REPORTED, log_path, stack_path
from fsdp_engine.world.recorder import Recorder, Tap
from fsdp_engine.world.registry import load_engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Wires:
    """A rank's two sockets: commands and replies, and the one whose closing ends it."""

    commands: socket.socket
    life: socket.socket


def prepare() -> Tap:
    """What every rank needs and none changes; done once, before ranks are forked."""
    wire.prepare()
    return Tap()


def serve(
    wires: Wires, *, directory: Path, rank: int, engine_name: str, tap: Tap, device: Device
) -> None:
    """The whole life of a rank; returns at Stop and when the controller is gone."""
    stacks = stack_path(directory, rank).open("wb")
    threading.Thread(target=_watch, args=(wires.life, tap, stacks), daemon=True).start()
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    commands = wires.commands
    try:
        device.enter(rank)
        engine = load_engine(engine_name)
    except BaseException as error:
        wire.send(commands, _failed(error, num_collectives=0))
        return
    log = CollectiveLog(log_path(directory, rank))
    wire.send(commands, wire.Ready(rank=rank))
    while True:
        try:
            command = wire.receive_command(commands)
        except (EOFError, ConnectionResetError):
            return
        match command:
            case wire.Stop():
                return
            case wire.AskTables():
                _answer_with(commands, _tables(engine, command))
            case wire.RunCase():
                log.start_case()
                recorder = Recorder(command.case.mesh, rank, log, device)
                _answer_with(commands, _run(engine, command, tap, recorder, device))
            case wire.EndCase():
                _leave()
                gc.collect()


def _answer_with(commands: socket.socket, reply: wire.Reply) -> None:
    """Send a reply; what an adapter returned that is no plain data is its failure, in words."""
    try:
        frame = wire.frame(reply)
    except (TypeError, ValueError) as error:
        frame = wire.frame(_failed(error, num_collectives=0))
    commands.sendall(frame)


def _run(
    engine: Engine, command: wire.RunCase, tap: Tap, recorder: Recorder, device: Device
) -> wire.Reply:
    case, rank = command.case, recorder.rank
    try:
        missing = _missing_action(engine, case)
        if missing is not None:
            return wire.Unsupported(reason=missing, offered=False)
        reason = engine.supports(case)
        if reason is not None:
            return wire.Unsupported(reason=reason)
        size = case.mesh.world_size
        numerics = device.numerics(engine.numerics(case), size) if rank == 0 else None
        _join(command.store, case, rank, device)
        context = RankContext(
            rank=rank,
            world_size=size,
            device=device.torch_name(rank),
            directory=command.files,
        )
        with tap.listening(recorder):
            observation = _observe(engine, case, context, recorder, device)
    except UnsupportedCase as error:
        _leave()
        return wire.Unsupported(reason=str(error), offered=False)
    except BaseException as error:
        return _failed(error, num_collectives=recorder.num_collectives)
    return wire.Done(numerics=numerics, observation=observation)


def _observe(
    engine: Engine, case: Case, context: RankContext, recorder: Recorder, device: Device
) -> RankObservation:
    with device.placing(recorder.place):
        if case.schedule is None:
            return drive(engine, case, context, recorder)
        with device.scheduled(case.schedule) as races:
            observation = drive(engine, case, context, recorder)
    return replace(observation, races=tuple(races))


def _missing_action(engine: Engine, case: Case) -> str | None:
    capabilities = engine.capabilities()
    offered = capabilities.actions
    missing = sorted({action.kind for action in case.program} - set(offered))
    if missing:
        return f"the engine has no {missing[0]} action; it has {', '.join(offered)}"
    for ability in map(ability_for, case.program):
        if ability in capabilities.without:
            return f"the engine has not: {ABILITIES[ability]}"
    return None


def _join(store: str, case: Case, rank: int, device: Device) -> None:
    world_size = case.mesh.world_size
    dist.init_process_group(
        device.backend(world_size),
        store=_store(store, world_size),
        rank=rank,
        world_size=world_size,
    )


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    forget_meshes()


def _store(place: str, world_size: int) -> dist.Store:
    if not place.startswith("tcp://"):
        return dist.FileStore(place, world_size)
    address, _, prefix = place.removeprefix("tcp://").partition("/")
    host, _, port = address.rpartition(":")
    return dist.PrefixStore(prefix, dist.TCPStore(host, int(port), is_master=False))


def _failed(error: BaseException, *, num_collectives: int) -> wire.Failed:
    return wire.Failed(
        error=type(error).__name__,
        message=str(error),
        traceback="".join(traceback.format_exception(error)),
        num_collectives=num_collectives,
    )


def _tables(engine: Engine, asked: wire.AskTables) -> wire.Reply:
    try:
        tables = EngineTables(
            capabilities=engine.capabilities(),
            defaults=engine.defaults(),
            mesh_shapes=tuple(
                _answer(partial(engine.mesh_shape, *pair)) for pair in asked.mesh_shapes
            ),
            strategies=tuple(
                _answer(partial(engine.strategy, ndim, zero3=zero3))
                for ndim, zero3 in asked.strategies
            ),
        )
    except Exception as error:
        return _failed(error, num_collectives=0)
    return wire.TablesReply(tables=tables)


def _answer(ask: Callable[[], str | tuple[int, ...]]) -> Answer:
    try:
        return Answer(value=ask())
    except Exception as error:
        return Answer(value=None, error_kind=type(error).__name__, error=str(error))


def _watch(life: socket.socket, tap: Tap, stacks: BinaryIO) -> NoReturn:
    """Wait for the controller's end or its question; runs beside a case that may hang."""
    while life.recv(1) == REPORT:
        tap.close_last()
        faulthandler.dump_traceback(stacks, all_threads=True)
        life.sendall(REPORTED)
    os._exit(1)

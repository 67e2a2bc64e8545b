"""Worlds for an engine named by the caller: a warm one that is kept, or a fresh one per case."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Self

from fsdp_engine.contract.case import Case
from fsdp_engine.contract.observation import Observation
from fsdp_engine.contract.protocol import EngineTables, Run
from fsdp_engine.world.device import settle
from fsdp_engine.world.wire import AskTables
from fsdp_engine.world.world import World


class WorldPool:
    """A `Run` over one warm world, as large as the largest case so far.

    A world that saw an exception, a death or a timeout is ended and replaced. `engine` is a
    registered name or `package.module:Class`, `device` one of `DEVICES`: this process computes as
    ranks do there from now on. Raises `AcceleratorError` where this machine has no such device.
    """

    def __init__(self, engine: str, *, case_timeout_s: float = 12.0, device: str = "cpu") -> None:
        settle(device)
        self._engine = engine
        self._case_timeout_s = case_timeout_s
        self._device = device
        self._warm: World | None = None

    def __call__(self, case: Case) -> Observation:
        """Run a case in the warm world. Raises a `RunError`, `EngineLoadError` for the engine."""
        world = self._world(case.mesh.world_size)
        try:
            return world.run(case)
        finally:
            if world.broken:
                self.close()

    @property
    def fresh(self) -> Run:
        """The same, every case in a world of its own."""
        return _Fresh(engine=self._engine, case_timeout_s=self._case_timeout_s, device=self._device)

    def tables(
        self,
        *,
        mesh_shapes: tuple[tuple[int, int], ...] = (),
        strategies: tuple[tuple[int, bool], ...] = (),
    ) -> EngineTables:
        """What the engine answers without ranks."""
        world = self._world(1)
        try:
            return world.tables(AskTables(mesh_shapes=mesh_shapes, strategies=strategies))
        finally:
            if world.broken:
                self.close()

    def close(self) -> None:
        """End the warm world; the next case starts another."""
        if self._warm is not None:
            self._warm.close()
            self._warm = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _world(self, size: int) -> World:
        if self._warm is None or self._warm.size < size:
            self.close()
            self._warm = World(
                self._engine,
                size=size,
                case_timeout_s=self._case_timeout_s,
                device=self._device,
            )
        return self._warm


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fresh:
    """Everything in a new world, which is ended afterwards."""

    engine: str
    case_timeout_s: float
    device: str

    def __call__(self, case: Case) -> Observation:
        with self._world(case.mesh.world_size) as world:
            return world.run(case)

    def tables(
        self,
        *,
        mesh_shapes: tuple[tuple[int, int], ...] = (),
        strategies: tuple[tuple[int, bool], ...] = (),
    ) -> EngineTables:
        with self._world(1) as world:
            return world.tables(AskTables(mesh_shapes=mesh_shapes, strategies=strategies))

    def _world(self, size: int) -> World:
        return World(self.engine, size=size, case_timeout_s=self.case_timeout_s, device=self.device)

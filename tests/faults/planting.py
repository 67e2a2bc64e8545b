"""How a fault is planted: one function of the engine is exchanged, in rank processes only.

A fault is the reference adapter with one mistake, in a class of its own that is reached by name
like any engine: `tests.faults.loss:NoRankFactor`. A world belongs to one engine, so what is
exchanged when the engine is built stays in the processes of that world. Faulty functions call the
originals they imported, so planting twice is planting once.
"""

from __future__ import annotations

from types import ModuleType
from typing import ClassVar, TypeAlias

from fsdp_engine.adapters.reference import Reference
from fsdp_engine.contract.case import Case
from fsdp_engine.contract.protocol import RankContext
from fsdp_engine.engine.engine import FsdpEngine

Exchange: TypeAlias = tuple[ModuleType | type, str, object]


def plant(owner: ModuleType | type, name: str, faulty: object) -> None:
    """Exchange what `owner` calls `name`."""
    assert hasattr(owner, name), f"{owner.__name__} has no {name} to exchange"
    setattr(owner, name, faulty)


class Planted(Reference):
    """The reference engine with a mistake that `plant_faults` plants before every build.

    `exchanged` is what it plants by itself: owner, name and what stands there instead.
    """

    exchanged: ClassVar[tuple[Exchange, ...]] = ()

    def plant_faults(self, case: Case) -> None:  # noqa: ARG002
        for owner, name, faulty in self.exchanged:
            plant(owner, name, faulty)

    def build(self, case: Case, rank: RankContext) -> FsdpEngine:
        self.plant_faults(case)
        return super().build(case, rank)

"""How soon a fault is found, and what smallest case is left of it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_engine.world.pool import WorldPool
from properties.profiles import PROFILES, Profile
from tests.detection.search import Detected, Item, Searching, SuiteTest, Watch, items_of, search
from tests.detection.shrinking import Minimal, phrase, shrink
from tests.faults.fault import Fault

DEFAULT = PROFILES["default"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Find:
    """One search: the property that searched, the seed, the cases judged, whether it accused.

    `error` says what ended the search otherwise.
    """

    property_id: str
    seed: int
    num_cases: int
    seconds: float
    found: bool
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One fault: every search for it, and the minimal case of the first one."""

    fault: Fault
    finds: tuple[Find, ...]
    minimal: Minimal | None

    @property
    def found(self) -> bool:
        """Whether every property found it with every seed."""
        return all(find.found for find in self.finds)

    def line(self) -> str:
        """What is printed of it."""
        fault = self.fault
        by = " ".join(
            f"{name}({','.join(self._cases(name))})" for name in dict.fromkeys(fault.found_by)
        )
        seconds = sum(find.seconds for find in self.finds) / max(1, len(self.finds))
        told = f"{fault.name}  {fault.kind}  {by}  {seconds:.1f} s a search"
        if self.minimal is not None:
            minimal = self.minimal
            told += f"  minimal in {minimal.seconds:.1f} s, {minimal.num_cases} cases: "
            told += phrase(minimal.case)
        errors = [f"{find.property_id}: {find.error}" for find in self.finds if find.error]
        return "\n  ".join([told if self.found else f"NOT FOUND  {told}", *errors])

    def to_plain(self) -> dict[str, Any]:
        """For the report."""
        minimal = self.minimal
        return {
            "fault": self.fault.name,
            "class": self.fault.kind,
            "source": self.fault.source,
            "found": self.found,
            "searches": [
                {
                    "property": find.property_id,
                    "seed": find.seed,
                    "found": find.found,
                    "cases": find.num_cases,
                    "seconds": round(find.seconds, 3),
                    "error": find.error,
                }
                for find in self.finds
            ],
            "minimal": None
            if minimal is None
            else {
                "case": phrase(minimal.case),
                "seconds": round(minimal.seconds, 3),
                "cases": minimal.num_cases,
            },
        }

    def _cases(self, name: str) -> list[str]:
        return [
            str(find.num_cases) if find.found else "-"
            for find in self.finds
            if find.property_id == name
        ]


def measure(
    fault: Fault, *, seeds: Iterable[int], shrinks: bool, profile: Profile = DEFAULT
) -> Measured:
    """Search for a fault with each of its properties and seeds; shrink what the first one finds."""
    finds: list[Find] = []
    minimal: Minimal | None = None
    with WorldPool(
        fault.engine, case_timeout_s=profile.case_timeout_s, device=fault.device
    ) as pool:
        for seed in seeds:
            for name in fault.found_by:
                find, place = _find(name, pool, seed=seed, profile=profile)
                if shrinks and not finds and place is not None:
                    minimal = _minimal(*place, pool, seed=seed, profile=profile)
                finds.append(find)
    return Measured(fault=fault, finds=tuple(finds), minimal=minimal)


def _find(
    name: str, pool: WorldPool, *, seed: int, profile: Profile
) -> tuple[Find, tuple[SuiteTest, Item] | None]:
    watch = Watch(run=pool)
    began = time.monotonic()
    found: tuple[SuiteTest, Item, Detected] | None = None
    error = ""
    with tempfile.TemporaryDirectory(prefix="fsdp-detection-") as root:
        searching = Searching(profile=profile, seed=seed, root=Path(root))
        try:
            found = search(items_of(name, profile), watch, searching)
        except Exception as raised:  # noqa: BLE001  a fault that cannot be searched is reported
            error = f"{type(raised).__name__}: {raised}"
    find = Find(
        property_id=name,
        seed=seed,
        num_cases=watch.num_cases,
        seconds=time.monotonic() - began,
        found=found is not None,
        error=error,
    )
    return find, None if found is None else found[:2]


def _minimal(
    test: SuiteTest, item: Item, pool: WorldPool, *, seed: int, profile: Profile
) -> Minimal:
    with tempfile.TemporaryDirectory(prefix="fsdp-detection-") as root:
        return shrink(test, item, pool, Searching(profile=profile, seed=seed, root=Path(root)))

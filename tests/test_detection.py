"""The suite's power: every planted fault is found by the properties that must find it.

Each property searches by itself, with the rows and draws of the default profile, and no property is
without a fault that it finds. `make detection` does the same with more seeds, in the profile's own
order, and measures.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_engine.world.pool import WorldPool
from properties.catalog import PROPERTIES
from properties.profiles import PROFILES
from tests.detection.search import Searching, Watch, items_of, search, suite_tests
from tests.faults.catalogue import FAULTS
from tests.faults.fault import Fault
from tests.world_cases import skip_without_device

DEFAULT = PROFILES["default"]

SEARCHES = [
    pytest.param(fault, name, id=f"{fault.name}-{name}")
    for fault in FAULTS
    for name in fault.found_by
]


@pytest.mark.parametrize(("fault", "name"), SEARCHES)
def test_fault_is_found(fault: Fault, name: str, tmp_path: Path) -> None:
    items = items_of(name, DEFAULT, first=fault.can_show)
    with WorldPool(fault.engine, device=fault.device) as pool:
        skip_without_device(pool)
        watch = Watch(run=pool)
        found = search(items, watch, Searching(profile=DEFAULT, seed=0, root=tmp_path))
    assert found is not None
    _, _, detected = found
    assert detected.verdict.outcome == "fail"
    assert watch.num_cases >= 1


def test_every_property_finds_a_fault() -> None:
    finding = {name for fault in FAULTS for name in fault.found_by}
    assert finding == set(PROPERTIES)


def test_every_property_has_a_suite() -> None:
    assert {test.property_id for test in suite_tests()} == set(PROPERTIES)


def test_every_fault_has_a_name_of_its_own() -> None:
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names)

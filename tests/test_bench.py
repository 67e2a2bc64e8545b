"""The parts of the bench that need no clock: table, statistics, bisection, planted errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from fsdp_engine.contract.observation import Observation
from fsdp_engine.world.pool import WorldPool
from oracles.arrays import tensor_of
from tests.bench.__main__ import main
from tests.bench.bisection import first_true, smallest_found
from tests.bench.sensitivity import Replayed, changed, median_place
from tests.bench.shrinking import lines_of
from tests.bench.table import Line, shown, table, write
from tests.bench.timing import interleaved, median_ratio
from tests.bench.typical import ENGINE, main_check, typical_case
from tests.detection.shrinking import Minimal
from tests.detection.summary import percentile

LINES = (
    Line(part="speed", name="warm", value=0.0512, unit="s", target="<= 0.06 s"),
    Line(part="rival", name="spawned", value=None, unit="s", note="not installed"),
)


def test_table_aligns_its_columns_and_names_what_was_not_measured() -> None:
    assert table(LINES) == [
        "part   what     value         target     note",
        "speed  warm     0.0512 s      <= 0.06 s",
        "rival  spawned  not measured             not installed",
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1.487, "1.49"),
        (0.00123, "0.00123"),
        (7.612e-8, "7.61e-08"),
        (1234.5, "1234"),
        (98765.0, "98765"),
        (2.5e7, "2.50e+07"),
    ],
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert shown(value) == text


def test_json_has_the_same_lines(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "bench.json"
    write(LINES, path)
    plain = json.loads(path.read_text(encoding="utf-8"))
    assert [Line(**entry) for entry in plain] == list(LINES)


def test_rounds_interleave_and_begin_with_another_action_each_time() -> None:
    calls: list[str] = []
    actions = {name: partial(calls.append, name) for name in "abc"}
    seconds = interleaved(actions, rounds=3)
    assert "".join(calls) == "cab" + "abc" + "bca" + "cab"
    assert {name: len(values) for name, values in seconds.items()} == {"a": 3, "b": 3, "c": 3}


def test_ratio_is_taken_within_rounds() -> None:
    assert median_ratio([2.0, 40.0, 6.0], [1.0, 10.0, 3.0]) == 2.0


@pytest.mark.parametrize(
    ("count", "fraction", "wanted"), [(10, 0.9, 9), (10, 1.0, 10), (1, 0.9, 1), (7, 0.5, 4)]
)
def test_percentile_is_one_of_the_values(count: int, fraction: float, wanted: int) -> None:
    values = list(np.random.default_rng(0).permutation(count) + 1.0)
    assert percentile(values, fraction) == wanted


@pytest.mark.parametrize("threshold", range(-3, 6))
def test_bisection_finds_the_first(threshold: int) -> None:
    assert first_true(lambda number: number >= threshold, -3, 5) == threshold


@pytest.mark.parametrize("allowed", [2.0**-20, 3.1e-4, 0.9])
def test_smallest_found_is_the_next_power_of_two(allowed: float) -> None:
    value = -0.75

    def found(change: Callable[[float], float]) -> bool:
        return abs(change(value) - value) > allowed * abs(value)

    error = smallest_found(found, value, torch.float64)
    assert error is not None
    assert allowed < error <= 2 * allowed


def test_an_error_that_rounding_removes_is_not_found() -> None:
    error = smallest_found(lambda _: True, 1.0, torch.bfloat16)
    assert error == 2.0**-7  # upwards from 1 the next bfloat16 is that far away


def test_nothing_is_found_by_what_finds_nothing() -> None:
    assert smallest_found(lambda _: False, 1.0, torch.float32) is None


def test_one_element_of_the_observed_gradients_changes_and_is_found() -> None:
    case = typical_case(2)
    with WorldPool(ENGINE) as pool:
        observation = pool(case)
    place = median_place(observation)
    after = changed(observation, place, lambda value: value * 1.5)
    assert _differences(observation, after) == 1
    assert main_check()(case, Replayed(observation)).outcome == "pass"
    assert main_check()(case, Replayed(after)).outcome == "fail"


def test_shrinking_lines_name_what_was_not_found() -> None:
    minimal = [
        Minimal(case=typical_case(size), seconds=float(size), num_cases=10 * size)
        for size in (2, 3, 4)
    ]
    lines = lines_of(minimal, num_faults=4, missed=["Lost"])
    values = {line.name: line.value for line in lines}
    assert lines[0].note == "not found: Lost"
    assert values["faults shrunk, of 4"] == 3
    assert values["to the minimal case, median"] == 3.0
    assert values["to the minimal case, p90"] == 4.0
    assert values["cases run for it, median"] == 30


def test_unknown_part_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "speed,sped"])
    assert "['sped'] unknown" in capsys.readouterr().err


def _differences(one: Observation, other: Observation) -> int:
    count = 0
    for before, after in zip(one.ranks, other.ranks, strict=True):
        for record, record_after in zip(before.records, after.records, strict=True):
            assert record.kind == record_after.kind == "train"
            for part, part_after in zip(record.gradients, record_after.gradients, strict=True):
                assert part.data is not None
                assert part_after.data is not None
                count += int((tensor_of(part.data) != tensor_of(part_after.data)).sum())
    return count

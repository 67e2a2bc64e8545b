"""Engines without a planted fault are not accused: a few of the cases of `--clean`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.detection.clean import Lot, judge_lot

ENGINES = ("reference", "torch_fsdp1", "torch_fsdp2")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("number", range(5))
def test_clean_engine_is_not_accused(engine: str, number: int, tmp_path: Path) -> None:
    lot = Lot(engine=engine, number=number, own=True, num_cases=3, folder=str(tmp_path))
    judged = judge_lot(lot)
    assert judged.num_cases == 3
    assert judged.accusations == ()
    assert judged.inconclusive == ()
    assert sum(judged.endings.values()) == 3

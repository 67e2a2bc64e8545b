"""The probe at the start of a session: what it finds, what it costs and what becomes of it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fsdp_engine.contract.case import DTYPE_POLICIES, Case
from fsdp_engine.contract.case_file import canonical_json
from fsdp_engine.world.pool import WorldPool
from oracles.verdict import NOT_REPLAYABLE
from properties import probe
from properties.catalog import PROPERTIES, load_check
from properties.checks.gradients import match_oracle, replicas_agree
from properties.probe import ProbedWorlds, first_difference, probe_cases
from properties.repro import PROJECT
from properties.strategies.tables import one_case
from tests.engines import unreplayable
from tests.wrong_reductions import Shown, with_gradients, with_parts
from tests.small_cases import small_case

OTHER_KERNELS = f"{unreplayable.HERE}:OtherKernels"
WRONG = "tests.engines.for_judging:DoublesGradients"
(FLOAT32,) = one_case()
BFLOAT16 = replace(FLOAT32, dtypes=DTYPE_POLICIES["fp32/bf16/fp32"])


def test_this_machine_is_confirmed() -> None:
    assert probe.probe() == {}


def test_every_compute_dtype_of_the_suites_is_probed() -> None:
    assert set(probe_cases()) == {policy.compute for policy in DTYPE_POLICIES.values()}
    for dtype, case in probe_cases().items():
        assert case.dtypes.compute == dtype
        assert case.dtypes in DTYPE_POLICIES.values()


def test_other_bits_in_one_dtype_are_found_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "PROBE_ENGINE", OTHER_KERNELS)
    found = probe.probe()
    assert list(found) == ["bfloat16"]
    assert "gradient " in found["bfloat16"]
    assert "bit for bit" in found["bfloat16"]


def test_what_does_not_run_is_not_confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "PROBE_ENGINE", f"{unreplayable.HERE}:RaisesInDouble")
    found = probe.probe()
    assert list(found) == ["float64"]
    assert "this device has no float64" in found["float64"]
    monkeypatch.setattr(probe, "PROBE_ENGINE", "no_such_engine")
    assert set(probe.probe()) == set(probe_cases())

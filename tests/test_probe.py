"""The probe of replay: what it finds, and what becomes of what it does not confirm."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_engine.contract.case import DTYPE_POLICIES, Mesh
from fsdp_engine.world.pool import WorldPool
from oracles.evaluation import Evaluation, Evaluator
from oracles.verdict import NOT_REPLAYABLE
from properties import probe, replay
from properties.catalog import load_check
from properties.probe import ProbedWorlds, first_difference, probe_cases
from properties.repro import write_repro
from properties.strategies.tables import one_case
from tests.engines import unreplayable
from tests.gpu_check.ranks import spoilt

WRONG = "tests.engines.for_judging:DoublesGradients"
(FLOAT32,) = one_case()
BFLOAT16 = replace(FLOAT32, dtypes=DTYPE_POLICIES["fp32/bf16/fp32"], mesh=Mesh(shape=(2, 1)))
BY_REPLAY = (
    "gradient-matches-oracle",
    "deferred-equals-eager",
    "split-invariance",
)


@pytest.fixture
def other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "PROBE_ENGINE", f"{unreplayable.HERE}:OtherKernels")


@pytest.fixture
def unsteady(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second replay is off by a last place in every element."""
    evaluate = Evaluator.evaluate

    def unsteady(self: Evaluator, *arguments: Any) -> Evaluation:
        found = evaluate(self, *arguments)
        if self._ballast is not None:
            for gradient in found.gradients.values():
                gradient.copy_(torch.nextafter(gradient, 2 * gradient))
        return found

    monkeypatch.setattr(Evaluator, "evaluate", unsteady)


def test_this_machine_is_confirmed() -> None:
    assert probe.probe() == {}


def test_every_compute_dtype_of_the_suites_is_probed() -> None:
    assert set(probe_cases()) == {policy.compute for policy in DTYPE_POLICIES.values()}
    for dtype, case in probe_cases().items():
        assert case.dtypes.compute == dtype
        assert case.dtypes in DTYPE_POLICIES.values()


@pytest.mark.usefixtures("unsteady")
def test_a_device_that_does_not_repeat_itself_is_held_to_its_bound() -> None:
    """Not to every bit; and to nothing more than two replays are apart."""
    case = probe_cases()["float32"]
    with WorldPool(probe.PROBE_ENGINE) as pool:
        shown = pool(case)
    there = replace(shown, numerics=replace(shown.numerics, device="cpu"))
    assert first_difference(case, shown) is None
    assert first_difference(case, there) is None
    assert first_difference(case, spoilt(there)) is not None


@pytest.mark.usefixtures("other_kernels")
def test_other_bits_in_one_dtype_are_found_there() -> None:
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


@pytest.fixture(scope="module")
def wrong() -> Iterator[ProbedWorlds]:
    with WorldPool(WRONG) as pool:
        yield ProbedWorlds(pool, {"bfloat16": "other bits"})


@pytest.mark.parametrize("name", BY_REPLAY)
def test_what_is_not_confirmed_is_neither_passed_nor_accused(
    wrong: ProbedWorlds, name: str
) -> None:
    check = load_check(name)
    for run in (wrong, wrong.fresh):
        verdict = check(BFLOAT16, run)
        assert (verdict.outcome, verdict.reason) == ("not_applicable", NOT_REPLAYABLE)
    assert check(FLOAT32, wrong).outcome == "fail"
    assert load_check("replicas-agree")(BFLOAT16, wrong).passed  # needs no replay


@pytest.mark.usefixtures("other_kernels")
def test_a_replayed_case_is_not_accused_either(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for case, code, status in ((FLOAT32, 1, "FAILED"), (BFLOAT16, 2, "ERROR")):
        path = write_repro(tmp_path, case, property_id=BY_REPLAY[0], engine=WRONG)
        assert replay.main([str(path), "--engine", WRONG]) == code
        line = capsys.readouterr().out
        assert line.startswith(status)
        assert (NOT_REPLAYABLE in line) == (case is BFLOAT16)

"""Scripts that show a failure: simplified first, run before they are shown."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from fsdp_engine.adapters.torch_fsdp import TorchFsdp1
from fsdp_engine.contract.actions import Infer, Train
from fsdp_engine.contract.batch import Batch, Sequence
from fsdp_engine.contract.case import DTYPE_POLICIES, Case, EngineOptions, Mesh, Optimizer
from fsdp_engine.contract.model import Model
from oracles.verdict import Verdict, not_applicable, passing
from properties.judge import PropertyFailure
from properties.minimise import Seen, minimise
from properties.proof import Proof, prove
from properties.repro import read_case_file
from properties.scripts.native import (
    MAX_LINES,
    Setting,
    Shown,
    beyond,
    has_control,
    native_script,
)
from properties.strategies.tables import one_case
from properties.trusted import Rations
from tests.detection.scripts import scripted
from tests.faults.catalogue import FAULTS
from tests.judging import WRONG, hand_on, judge_of

(CASE,) = one_case()
BY_NAME = {fault.name: fault for fault in FAULTS}

RICH = Case(
    mesh=Mesh(shape=(2, 2)),
    model=Model(family="qwen2", units=2, width=8, tied=True, lora_rank=2),
    dtypes=DTYPE_POLICIES["fp32/bf16/fp32"],
    engine=EngineOptions(deferred=True, reshard_after_forward=False, loss_mode="token-sum"),
    optimizer=Optimizer(kind="adamw"),
    batches=tuple(
        Batch(
            ranks=tuple(
                tuple(Sequence(key=10 * rank + k, length=3, loss_tokens=2) for k in range(2))
                for rank in range(4)
            )
        )
        for _ in range(2)
    ),
    program=(Train(batch=1, step=True), Infer(), Train(step=True)),
    seed=7,
)


def test_everything_that_does_not_matter_goes() -> None:
    """Fewer ranks, no transformer, no optimizer, sequences all alike."""

    def look(case: Case) -> Seen:
        return "fails" if case.engine.deferred and case.mesh.world_size > 1 else "passes"

    found = minimise(RICH, look)
    assert found.case == replace(
        CASE, engine=EngineOptions(deferred=True), batches=found.case.batches
    )
    assert [len(rank) for rank in found.case.batches[0].ranks] == [1, 1]
    assert found.controls[0] == ("eager sync", replace(found.case, engine=EngineOptions()))
    assert all(look(control) == "passes" for _, control in found.controls)


@pytest.mark.parametrize("field", ["dtypes", "model", "program"])
def test_what_matters_stays(field: str) -> None:
    def look(case: Case) -> Seen:
        return "fails" if getattr(case, field) == getattr(RICH, field) else "otherwise"

    found = minimise(RICH, look)
    assert getattr(found.case, field) == getattr(RICH, field)
    assert found.case.engine == EngineOptions()
    assert not found.controls


def test_without_time_nothing_is_tried() -> None:
    assert minimise(RICH, lambda _: "fails", max_seconds=0.0).case == RICH


def test_a_pass_and_what_does_not_apply_are_no_failure(tmp_path: Path) -> None:
    """A case is only taken for a simpler one where the check itself fails it."""
    stepping = replace(CASE, program=(Train(step=True),))

    def behave(case: Case) -> Verdict:
        if case.program == stepping.program:
            return WRONG
        return not_applicable("no step")

    judge = judge_of(tmp_path, behave)
    judge.rations, judge.device = Rations(), "sim"  # no script without this project there
    with pytest.raises(PropertyFailure) as caught:
        judge(hand_on, stepping)
    told = str(judge.settled(caught.value))
    (path,) = tmp_path.glob("*.json")
    assert read_case_file(path.read_text()).case.program == stepping.program
    assert f"script: {path.with_suffix('.py')} (it needs this project; not verified" in told


def test_one_script_of_each_kind_of_failure_is_run(tmp_path: Path) -> None:
    """A second failure of a property is told without; so is one that is no ending of the case."""
    judge = judge_of(tmp_path, lambda _: WRONG)
    judge.rations = Rations(done={("tests.judging:hand_on", "Failed")})
    with pytest.raises(PropertyFailure) as caught:
        judge(hand_on, CASE)
    assert judge.settled(caught.value) is caught.value
    flaky = judge_of(tmp_path, lambda _: WRONG, lambda _: passing())
    flaky.rations = Rations()
    with pytest.raises(PropertyFailure) as caught:
        flaky(hand_on, CASE)
    assert flaky.settled(caught.value) is caught.value


def _script(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(text)
    return path


def test_a_proof_says_what_it_saw(tmp_path: Path) -> None:
    shows = _script(tmp_path, "import sys; print('FAILED it'); sys.exit('control' not in sys.argv)")
    proof = prove(shows, has_control=True)
    assert proof.holds
    assert str(proof) == "verified 2/2, control passes"
    assert proof.line == "FAILED it"
    fine = _script(tmp_path, "print('FIXED all is well')")
    assert str(prove(fine, has_control=False)) == (
        "not verified: its runs ended FIXED, FIXED (FIXED all is well)"
    )
    both = Proof(codes=(1, 1), control=1, line="FAILED")
    assert not both.holds
    assert "its control FAILED" in str(both)


def test_a_script_sees_nothing_of_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setenv("ENGINE", "reference")
    text = "import os, sys; sys.exit(any(n in os.environ for n in ('PYTHONPATH', 'ENGINE')))"
    assert prove(_script(tmp_path, text), has_control=False).codes == (0, 0)


def _shown(engine: str, family: str, how: str, case: Case, control: Case | None = None) -> Shown:
    def setting(of: Case) -> Setting:
        numerics = TorchFsdp1().numerics(of) if how == "Failed" else None
        return Setting(case=of, numerics=numerics)

    return Shown(
        setting=setting(case),
        property_id="gradient-matches-oracle",
        engine=engine,
        family=family,
        how=how,
        seen="what was seen",
        versions="torch",
        control=None if control is None else setting(control),
        difference="on one axis",
    )


def test_plain_torch_needs_nothing_but_torch(tmp_path: Path) -> None:
    """FSDP1 on a (W, 1) mesh reduces over no rank but its own."""
    control = replace(CASE, engine=EngineOptions(strategy="fsdp1"))
    column = replace(control, mesh=Mesh(shape=(2, 1)))
    text = native_script(
        _shown("torch_fsdp1", "torch_fsdp1", "Failed", column, control), name="script.py"
    )
    assert text is not None
    assert has_control(text)
    imported = set(re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE))
    assert imported == {"contextlib", "types", "torch"}
    assert "fsdp_engine" not in text
    proof = prove(_script(tmp_path, text), has_control=True)
    assert proof.holds, str(proof)
    assert proof.line.startswith("FAILED gradient ")


def test_a_hang_is_shown_by_the_script_s_own_deadline(tmp_path: Path) -> None:
    shown = _shown("tests.engines.stalling:Stalls", "reference", "Hung", CASE)
    text = native_script(shown, name="script.py")
    assert text is not None
    assert len(text.splitlines()) <= MAX_LINES
    own = "fsdp_engine.contract|oracles|properties"
    assert not re.search(f"^(from|import) ({own})", text, re.MULTILINE)
    proof = prove(_script(tmp_path, text), has_control=False)
    assert proof.holds, str(proof)
    assert proof.line.startswith("FAILED hang")


def test_what_a_script_has_no_words_for() -> None:
    assert not beyond(CASE)
    assert beyond(RICH) == "more than one batch, a qwen2 model"
    assert native_script(_shown("mine", "mine", "Raised", CASE), name="x") is None
    assert native_script(_shown("reference", "reference", "Died", CASE), name="x") is None


def test_a_script_shows_a_fault_and_nothing_else() -> None:
    """Found, shrunk, simplified, written, run; `tests.detection --scripts` does it for more."""
    measured = scripted(BY_NAME["OneRankShardGroup"])
    assert measured.good, measured.line()
    assert measured.needs == "torch and the engine alone"

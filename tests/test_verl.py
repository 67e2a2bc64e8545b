"""verl as an engine under test: found by name, replayed bit for bit, its issues rediscovered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from fsdp_engine.contract.actions import Action, Eval, Export, Infer, Interrupt, Resume, Train
from fsdp_engine.contract.batch import Batch, Sequence, TokenBudget
from fsdp_engine.contract.case import Case, Mesh, Strategy
from fsdp_engine.contract.errors import EngineLoadError
from fsdp_engine.contract.model import Model
from fsdp_engine.contract.protocol import DeviceName
from fsdp_engine.world.pool import WorldPool
from fsdp_engine.world.registry import load_engine, registered
from properties.catalog import load_check
from properties.issues import verl as issues
from properties.issues.issue import shown_on
from properties.issues.verl_defects import LONG
from properties.judge import Judge
from properties.known_issues import KNOWN_ISSUES
from properties.trial import Trial
from tests.known_issue_cases import MIXED, MLP, NEXT, case_of

GRADIENTS = "gradient-matches-oracle"
STRATEGIES: tuple[Strategy, ...] = ("fsdp1", "fsdp2")
LORA = replace(MLP, lora_rank=2)
ON_ROOT = Model(family="embedding", tied=True, lora_rank=2, lora_targets="all")
MERGED = (Train(), Export(weights="merged"))
STOPPED = Interrupt(phase="forward")
HELD = Export(weights="merged", drain="hold", after=1)
MOMENT: tuple[Action, ...] = (Export(drain="hold"), Train(step=True), Resume())


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """An issue's id, the property that finds it and a small case in which it must show."""

    id: str
    case: Case
    found_by: str = GRADIENTS
    device: DeviceName = "cpu"


def _low(strategy: Strategy) -> Case:
    return case_of(strategy, model=MLP, dtypes=MIXED, deferred=True)


def _with_one_each(case: Case, *shape: int, length: int) -> Case:
    """The case on that mesh with a sequence of so many positions on every rank."""
    mesh = Mesh(shape=shape)
    ranks = (
        (Sequence(key=key, length=length, loss_tokens=length),) for key in range(mesh.world_size)
    )
    return replace(case, mesh=mesh, batches=(Batch(ranks=tuple(ranks)),))


def _far(strategy: Strategy) -> Case:
    case = case_of(strategy, model=Model(family="mixtral", width=8), dtypes="bf16/bf16/fp32")
    return _with_one_each(case, 2, length=LONG)


SHOWN = (
    Shown(id="verl-entry-points-disagree", case=case_of("fsdp2"), found_by="entry-points-agree"),
    Shown(id="verl-mesh-of-any-size", case=case_of("fsdp2"), found_by="mesh-is-total"),
    Shown(id="verl-fsdp1-one-shard-never-averages", case=case_of("fsdp1", mesh=(2, 1))),
    Shown(id="verl-fsdp1-deferred-adds-in-compute-dtype", case=_low("fsdp1")),
    Shown(
        id="verl-fsdp2-interrupted-batch-stays",
        case=case_of("fsdp2", Interrupt(micro_batch=1), NEXT, deferred=True),
    ),
    Shown(
        id="verl-root-adapter-is-not-merged",
        case=case_of("fsdp2", Export(weights="merged"), model=ON_ROOT, dtypes="bf16/bf16/fp32"),
        found_by="export-matches-oracle",
    ),
    Shown(
        id="verl-merged-export-in-bf16",
        case=case_of("fsdp2", Export(weights="merged"), model=LORA),
        found_by="export-matches-oracle",
    ),
    *(
        Shown(
            id="verl-merged-while-exported",
            case=case_of(strategy, *program, model=LORA),
            found_by=found_by,
        )
        for strategy in STRATEGIES
        for program, found_by in (
            ((HELD,), "export-changes-nothing"),
            ((HELD, Train()), GRADIENTS),
        )
    ),
    Shown(
        id="verl-fsdp1-adapter-export-is-empty",
        case=case_of("fsdp1", Export(weights="adapter"), model=LORA),
        found_by="export-matches-oracle",
    ),
    *(Shown(id="verl-rotary-frequencies-in-bf16", case=_far(strategy)) for strategy in STRATEGIES),
    *(
        Shown(
            id="verl-exports-buffers-in-bf16",
            case=case_of(
                strategy, Export(), model=replace(MLP, buffers=True), dtypes="bf16/bf16/fp32"
            ),
            found_by="export-matches-oracle",
        )
        for strategy in STRATEGIES
    ),
    Shown(
        id="verl-fsdp1-evaluation-before-a-forward",
        case=_with_one_each(case_of("fsdp1", Eval(), Train()), 2, 2, length=3),
    ),
    Shown(
        id="verl-fsdp2-merges-no-few-rows",
        case=case_of("fsdp2", Export(weights="merged"), model=replace(LORA, hidden=1)),
        found_by="export-matches-oracle",
    ),
    Shown(
        id="verl-fsdp2-merges-no-few-rows",
        case=case_of("fsdp2", Infer(adapter="merged"), model=replace(LORA, hidden=1)),
        found_by="adapter-switch-matches-oracle",
    ),
    *(
        Shown(
            id="verl-fsdp1-no-shard-exports-no-frozen-units",
            case=case_of("fsdp1", *MERGED, mesh=(1,), model=LORA, dtypes=dtypes),
            found_by="export-matches-oracle",
        )
        for dtypes in ("fp32", "bf16/bf16/fp32")
    ),
    *(
        Shown(
            id="verl-fsdp2-first-forward-without-adapter",
            case=case_of("fsdp2", Infer(adapter="off"), Train(), model=LORA, dtypes=low),
        )
        for low in (MIXED, "fp32/bf16/bf16")
    ),
    *(
        Shown(
            id="verl-lora-exports-on-the-host",
            case=case_of("fsdp2", Export(weights=weights), model=LORA),
            found_by="tensors-rest-where-asked",
            device="sim",
        )
        for weights in ("base", "adapter")
    ),
    *(
        Shown(
            id="verl-plans-by-reading-the-device",
            case=case_of(strategy),
            found_by="device-copies-are-needed",
            device="sim",
        )
        for strategy in STRATEGIES
    ),
    *(
        Shown(
            id="verl-fsdp1-buffers-stay-on-the-device",
            case=case_of("fsdp1", model=model, param_offload=True),
            found_by="tensors-rest-where-asked",
            device="sim",
        )
        for model in (replace(MLP, buffers=True), Model(family="qwen2"))
    ),
    *(
        Shown(
            id="verl-merges-by-way-of-the-host",
            case=case_of(strategy, Export(weights="merged"), model=LORA),
            found_by="device-copies-are-needed",
            device="sim",
        )
        for strategy in STRATEGIES
    ),
    *(
        Shown(
            id="verl-fsdp1-offloads-not-what-is-gathered",
            case=case_of("fsdp1", STOPPED, param_offload=True, reshard_after_forward=reshard),
            found_by="tensors-rest-where-asked",
            device="sim",
        )
        for reshard in (True, False)
    ),
    *(
        Shown(
            id="verl-fsdp2-offloads-what-is-gathered",
            case=case_of(
                "fsdp2", STOPPED, mesh=mesh, param_offload=True, reshard_after_forward=False
            ),
            found_by="interrupted-batch-changes-nothing",
            device="sim",
        )
        for mesh in ((1,), (2,))
    ),
    Shown(
        id="verl-fsdp2-export-of-the-moment",
        case=case_of("fsdp2", *MOMENT),
        found_by="export-matches-oracle",
    ),
)


def test_it_is_registered_and_says_what_it_needs() -> None:
    assert registered()["verl"] == "fsdp_engine.adapters.verl.engine:Verl"
    if find_spec("verl") is not None:
        pytest.skip("verl is installed here, so nothing is missing")
    with pytest.raises(EngineLoadError, match=r"verl is not installed.*\[verl\]"):
        load_engine("verl")


@pytest.mark.parametrize("shown", SHOWN, ids=lambda shown: f"{shown.id}-{shown.found_by}")
def test_its_issue_is_certain_in_the_case_that_shows_it(shown: Shown) -> None:
    (issue,) = [issue for issue in KNOWN_ISSUES if issue.id == shown.id]
    assert issue.must(shown.case)
    assert issue.hits(shown.case)
    assert issue.concerns(issues.ENGINE, shown.found_by)
    assert shown.device in issue.devices


@pytest.fixture(scope="module", params=["cpu"])
def pool(request: pytest.FixtureRequest) -> Iterator[WorldPool]:
    pytest.importorskip("verl", reason="verl is not installed: `make properties ENGINE=verl`")
    with WorldPool("verl", case_timeout_s=60, device=request.param) as pool:
        yield pool


def _judge(folder: Path, pool: WorldPool, device: DeviceName = "cpu") -> Judge:
    issues = shown_on(device, KNOWN_ISSUES)
    trial = Trial(worlds=pool, engine="verl", known_issues=issues)
    return Judge(trial=trial, repro_folder=folder, device=device)


@pytest.mark.parametrize(
    ("pool", "shown"),
    [(shown.device, shown) for shown in SHOWN],
    ids=[f"{shown.id}-{shown.found_by}" for shown in SHOWN],
    indirect=["pool"],
)
def test_its_issue_is_found(pool: WorldPool, tmp_path: Path, shown: Shown) -> None:
    judge = _judge(tmp_path, pool, shown.device)
    judge(load_check(shown.found_by), shown.case)
    (tally,) = judge.tallies.values()
    assert tally.known_issue == {shown.id: 1}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtypes", ["fp32", MIXED, "bf16/bf16/fp32"])
def test_gradients_are_the_replayed_ones(
    pool: WorldPool, tmp_path: Path, strategy: Strategy, dtypes: str
) -> None:
    """With the autocast that is declared below fp32; the reduction is judged rigorously."""
    judge = _judge(tmp_path, pool)
    judge(load_check(GRADIENTS), case_of(strategy, dtypes=dtypes))
    (tally,) = judge.tallies.values()
    assert (tally.verdict, tally.judged) == ("pass", 1)


def test_a_router_sends_padding_where_it_does_in_a_replay(pool: WorldPool, tmp_path: Path) -> None:
    """How many rows an expert multiplies decides how its sums are rounded."""
    batch = Batch(
        ranks=(
            (Sequence(key=0, length=2, loss_tokens=1), Sequence(key=1, length=2, loss_tokens=1)),
            (Sequence(key=2, length=3, loss_tokens=1), Sequence(key=3, length=5, loss_tokens=2)),
        )
    )
    planning = TokenBudget(max_tokens=12)
    case = case_of("fsdp1", model=Model(family="mixtral", hidden=5), planning=planning)
    judge = _judge(tmp_path, pool)
    judge(load_check(GRADIENTS), replace(case, batches=(batch,), seed=92794))
    (tally,) = judge.tallies.values()
    assert (tally.verdict, tally.judged) == ("pass", 1)


@pytest.mark.parametrize("reshard", [True, False])
def test_a_forward_with_merged_weights_leaves_them_whole(
    pool: WorldPool, tmp_path: Path, *, reshard: bool
) -> None:
    program = (Infer(adapter="off"), Infer(adapter="merged"), Train(), Infer(adapter="on"))
    case = case_of("fsdp2", *program, model=LORA, reshard_after_forward=reshard)
    judge = _judge(tmp_path, pool)
    judge(load_check("adapter-switch-matches-oracle"), case)
    (tally,) = judge.tallies.values()
    assert (tally.verdict, tally.judged) == ("pass", 1)


@pytest.mark.parametrize("pool", ["sim"], indirect=True)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_rests_on_the_host_is_read_when_it_is_there(
    pool: WorldPool, tmp_path: Path, strategy: Strategy
) -> None:
    """Nothing waits behind a mode in which nothing runs but who reads."""
    case = case_of(strategy, Eval(), Train(), param_offload=True, optimizer_offload=True)
    judge = _judge(tmp_path, pool, "sim")
    judge(load_check("device-order-is-kept"), case)
    (tally,) = judge.tallies.values()
    assert (tally.verdict, tally.judged) == ("pass", 1)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_three_changes_it_started_from(
    pool: WorldPool, tmp_path: Path, strategy: Strategy
) -> None:
    """Strategy per mesh, export staged as unstaged, deferred as eager with its legacy object."""
    judge = _judge(tmp_path, pool)
    judge(load_check("strategy-is-total"), case_of(strategy))
    judge(load_check("staged-export-equals-unstaged"), case_of(strategy, Export()))
    judge(load_check("deferred-equals-eager"), case_of(strategy, deferred=True))
    assert {tally.verdict for tally in judge.tallies.values()} == {"pass"}

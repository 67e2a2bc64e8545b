"""The reference engine on real ranks: interruptions, non-finite gradients, irregular batches."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, Literal

import pytest

from fsdp_engine.contract.actions import Export, Infer, Restore, Resume, Train
from fsdp_engine.contract.batch import Batch, Sequence, TokenBudget
from fsdp_engine.contract.case import DTYPE_POLICIES, Case, Mesh, Optimizer, Strategy
from fsdp_engine.contract.errors import EngineRaised, UnsupportedCase
from fsdp_engine.contract.model import Model, OptionalPart
from fsdp_engine.contract.observation import ExportRecord, Observation, TrainRecord
from fsdp_engine.contract.protocol import Run
from fsdp_engine.world.pool import WorldPool
from properties.checks import gradients
from tests.world_cases import world_case

TIMEOUT_S = 60.0
MLP = Model(family="mlp", units=2, bias=True)
STRATEGIES: tuple[Strategy, ...] = ("fsdp1", "fsdp2")
DECAYING = Optimizer(kind="adamw", weight_decay=0.25)


@pytest.fixture(scope="module")
def reference() -> Iterator[Run]:
    with WorldPool("reference", case_timeout_s=TIMEOUT_S) as pool:
        yield pool


def shown(observation: Observation, action: int) -> list[tuple[Any, ...]]:
    """What every rank showed of a train action: gradients, parameters, losses."""
    records = [rank.records[action] for rank in observation.ranks]
    return [
        (record.gradients, record.parameters, record.total_loss, record.plan)
        for record in records
        if isinstance(record, TrainRecord)
    ]


@pytest.mark.parametrize(
    "interruption",
    [
        f"{phase}Of{number}"
        for phase in ("Forward", "Loss", "Backward")
        for number in ("First", "Second")
    ],
)
def test_an_interrupted_batch_leaves_nothing(reference: Run, interruption: str) -> None:
    with WorldPool(f"tests.engines.interrupted:{interruption}", case_timeout_s=TIMEOUT_S) as pool:
        for strategy in STRATEGIES:
            for deferred in (False, True):
                for reshard in (True, False):
                    case = world_case(
                        strategy,
                        deferred=deferred,
                        reshard_after_forward=reshard,
                        model=MLP,
                        dtypes=DTYPE_POLICIES["fp32/bf16/fp32"],
                        program=(Train(step=True), Train(step=True)),
                    )
                    spoilt, plain = pool(case), reference(case)
                    for action in range(2):
                        assert shown(spoilt, action) == shown(plain, action), case.engine


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("mesh", [(2,), (2, 1)])
def test_a_non_finite_gradient_steps_nowhere(
    reference: Run, strategy: Strategy, mesh: tuple[int, ...]
) -> None:
    case = world_case(
        strategy,
        mesh=mesh,
        model=MLP,
        optimizer=DECAYING,
        program=(Train(step=True), Train(step=True), Train(step=True)),
    )
    engine = "tests.engines.interrupted:InfiniteOnRankZero"
    with WorldPool(engine, case_timeout_s=TIMEOUT_S) as pool:
        spoilt = pool(case)
    plain = reference(dataclasses.replace(case, program=case.program[1:]))
    for rank in spoilt.ranks:
        record = rank.records[0]
        assert isinstance(record, TrainRecord)
        assert not record.stepped
        assert record.norm is not None
        assert not math.isfinite(record.norm)
        assert record.parameters == rank.initial
    assert shown(spoilt, 1) == shown(plain, 0)
    assert shown(spoilt, 2) == shown(plain, 1)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("deferred", [False, True])
def test_sync_flags_come_back_as_they_were(strategy: Strategy, *, deferred: bool) -> None:
    case = world_case(strategy, deferred=deferred, model=MLP)
    with WorldPool("tests.engines.interrupted:KeepsFlags", case_timeout_s=TIMEOUT_S) as pool:
        pool(case)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("weights", ["all", "base", "adapter", "merged"])
@pytest.mark.parametrize("after", [0, 1])
def test_an_export_does_not_go_on_after_a_write(
    reference: Run,
    strategy: Strategy,
    weights: Literal["all", "base", "adapter", "merged"],
    after: int,
) -> None:
    held = Export(weights=weights, drain="hold", after=after)
    program = (Train(), held, Train(step=True), Resume(), held, Restore(), Resume())
    model = dataclasses.replace(MLP, lora_rank=2, lora_targets="all")
    for rank in reference(world_case(strategy, model=model, program=program)).ranks:
        for taken, resumed in ((1, 3), (4, 6)):
            first, rest = rank.records[taken], rank.records[resumed]
            assert isinstance(first, ExportRecord)
            assert isinstance(rest, ExportRecord)
            assert (first.raised, len(first.tensors)) == ("", after)
            assert (rest.raised, rest.tensors) == ("EngineStateError", ())


def gated_case(
    strategy: Strategy,
    optional: OptionalPart,
    gates: tuple[tuple[bool, ...], ...],
    **fields: Any,
) -> Case:
    """`gates[r]` says which of rank r's micro-batches use the optional part; then all do."""
    mesh = Mesh(shape=fields.pop("mesh", (len(gates),)))

    def batch(used: tuple[tuple[bool, ...], ...]) -> Batch:
        return Batch(
            ranks=tuple(
                tuple(
                    Sequence(key=10 * rank + number, length=2 + number, loss_tokens=1, gated=gate)
                    for number, gate in enumerate(row)
                )
                for rank, row in enumerate(used)
            )
        )

    everything = tuple((True,) * len(row) for row in gates)
    case = world_case(
        strategy,
        mesh=mesh.shape,
        model=Model(family="mlp", units=2, optional=optional),
        optimizer=DECAYING,
        **fields,
    )
    return dataclasses.replace(
        case,
        batches=(batch(gates), batch(everything)),
        program=(Train(step=True), Infer(), Train(batch=1, step=True), Train(step=True)),
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("mesh", [(2,), (2, 1)])
@pytest.mark.parametrize("optional", ["parameter", "unit"])
@pytest.mark.parametrize("row", ["100", "010", "001", "110", "000"])
def test_irregular_deferred_batches_are_right(
    reference: Run, strategy: Strategy, mesh: tuple[int, ...], optional: OptionalPart, row: str
) -> None:
    """Both ranks use the optional part in the same micro-batches, ZeRO-2 and ZeRO-3."""
    gates = (tuple(gate == "1" for gate in row),) * 2
    for reshard in (True, False):
        case = gated_case(
            strategy,
            optional,
            gates,
            mesh=mesh,
            deferred=True,
            reshard_after_forward=reshard,
            dtypes=DTYPE_POLICIES["fp32/bf16/fp32"],
        )
        verdict = gradients.match_oracle(case, reference)
        assert not verdict.mismatches, verdict.mismatches
        assert not any(r.records[0].notes for r in reference(case).ranks)  # type: ignore[union-attr]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("policy", ["fp32", "fp32/bf16/fp32"])
def test_a_parameter_that_one_rank_uses(
    reference: Run, strategy: Strategy, policy: str, *, deferred: bool
) -> None:
    gates = ((False, False), (False, True))
    case = gated_case(
        strategy, "parameter", gates, deferred=deferred, dtypes=DTYPE_POLICIES[policy]
    )
    verdict = gradients.match_oracle(case, reference)
    assert not verdict.mismatches, verdict.mismatches


def test_ranks_that_would_run_different_units_are_declined(reference: Run) -> None:
    case = gated_case("fsdp2", "unit", ((True, False), (True, True)))
    with pytest.raises(UnsupportedCase, match="optional unit"):
        reference(case)


def test_ranks_agree_on_the_number_of_micro_batches(reference: Run) -> None:
    """Rank 1 needs three micro-batches; rank 0 has sequences for two, or for one."""
    long, short = (Sequence(key=key, length=4) for key in (0, 1))
    many = tuple(Sequence(key=10 + number, length=4) for number in range(5))
    case = world_case("fsdp2", model=MLP)
    options = dataclasses.replace(case.engine, planning=TokenBudget(max_tokens=8))
    for few, count in (((long, short), 2), ((short,), 1)):
        case = dataclasses.replace(case, engine=options, batches=(Batch(ranks=(few, many)),))
        records = [rank.records[0] for rank in reference(case).ranks]
        assert [len(r.plan) for r in records if isinstance(r, TrainRecord)] == [count] * 2
        notes = [r.notes for r in records if isinstance(r, TrainRecord)]
        assert notes[0] == ()
        assert notes[1]
        verdict = gradients.match_oracle(case, reference)
        assert not verdict.mismatches, verdict.mismatches


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("mesh", [(2,), (2, 1)])
@pytest.mark.parametrize("deferred", [False, True])
def test_an_unused_parameter_has_no_gradient_and_does_not_decay(
    reference: Run, strategy: Strategy, mesh: tuple[int, ...], *, deferred: bool
) -> None:
    case = gated_case(strategy, "parameter", ((False, False),) * 2, mesh=mesh, deferred=deferred)
    for rank in reference(case).ranks:
        record = rank.records[0]
        assert isinstance(record, TrainRecord)
        assert record.stepped
        absent = [part.name for part in record.gradients if part.data is None]
        assert absent == ["layers.1.extra"]
        before, after = (
            {part.name: part.data for part in parts} for parts in (rank.initial, record.parameters)
        )
        assert after["layers.1.extra"] == before["layers.1.extra"]
        assert after != before


@pytest.mark.parametrize("model", [MLP, Model(family="embedding", tied=True)])
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("policy", ["fp32", "fp32/bf16/fp32", "bf16/bf16/fp32", "fp64"])
def test_fsdp1_averages_over_replicas_of_one_shard(
    reference: Run, policy: str, model: Model, *, deferred: bool
) -> None:
    case = world_case(
        "fsdp1",
        mesh=(2, 1),
        micro_batches=3,
        deferred=deferred,
        model=model,
        dtypes=DTYPE_POLICIES[policy],
        program=(Train(step=True), Train(step=True)),
    )
    for check in (gradients.match_oracle, gradients.replicas_agree):
        verdict = check(case, reference)
        assert not verdict.mismatches, verdict.mismatches


@pytest.mark.parametrize("override", [("fsdp_size", 0), ("clip_grad", -1.0), ("unknown", 1)])
def test_refusals_come_before_any_collective_on_every_rank(
    reference: Run, override: tuple[str, Any]
) -> None:
    case = world_case(model=MLP)
    options = dataclasses.replace(case.engine, overrides=(override,))
    with pytest.raises(EngineRaised) as raised:
        reference(dataclasses.replace(case, engine=options))
    assert set(raised.value.kinds.values()) == {"ConfigError"}
    assert set(raised.value.num_collectives.values()) == {0}
    assert len(raised.value.kinds) == 2

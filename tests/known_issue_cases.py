"""For every known issue a small case in which it must show."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, get_args

from fsdp_engine.contract.actions import (
    Action,
    Export,
    Freeze,
    Infer,
    Interrupt,
    Load,
    Restore,
    Save,
    Train,
    Unfreeze,
)
from fsdp_engine.contract.batch import Batch, Sequence
from fsdp_engine.contract.case import (
    DTYPE_POLICIES,
    Case,
    EngineOptions,
    Mesh,
    Optimizer,
    Strategy,
)
from fsdp_engine.contract.model import Model

GRADIENTS = "gradient-matches-oracle"
MLP = Model(family="mlp", units=2, hidden=8)
TIED = Model(family="embedding", tied=True)
NEXT = Train(batch=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """An issue's id, the property that finds it and a small case in which it must show."""

    id: str
    case: Case
    found_by: str = GRADIENTS
    device: str = "cpu"
    on: str = ""

    @property
    def engine(self) -> str:
        return self.on or f"torch_{self.case.engine.strategy}"


def _batch(first_key: int, gates: tuple[tuple[bool, ...], ...]) -> Batch:
    keys = iter(range(first_key, first_key + 64))
    return Batch(
        ranks=tuple(
            tuple(
                Sequence(
                    key=next(keys),
                    length=3 + (rank + index) % 2,
                    loss_tokens=1 + rank + index,
                    gated=gated,
                )
                for index, gated in enumerate(local)
            )
            for rank, local in enumerate(gates)
        )
    )


def case_of(
    strategy: Strategy,
    *program: Action,
    model: Model = MLP,
    mesh: tuple[int, ...] = (2,),
    dtypes: str = "fp32",
    gates: tuple[tuple[bool, ...], ...] | None = None,
    **engine: Any,
) -> Case:
    """Two micro-batches of one sequence on every rank; `gates` are those of both batches."""
    size = Mesh(shape=mesh).world_size
    gates = gates or ((True, True),) * size
    return Case(
        mesh=Mesh(shape=mesh),
        model=model,
        dtypes=DTYPE_POLICIES[dtypes],
        engine=EngineOptions(strategy=strategy, **engine),
        optimizer=Optimizer(kind="adamw", weight_decay=0.0625),
        batches=(_batch(0, gates), _batch(100, gates)),
        program=program or (Train(),),
        seed=7,
    )


MIXED = "fp32/bf16/fp32"
ONLY_FIRST = ((True, False), (True, False))
ONLY_LAST = ((False, True), (False, True))
NEVER = ((False, False), (False, False))
ON_RANK_0 = ((True, True), (False, False))
UNIT = replace(MLP, optional="unit")
PARAMETER = replace(MLP, optional="parameter")
EITHER = replace(MLP, optional="either")
FROZEN = replace(MLP, frozen="first_unit")
RESTORE = (Train(step=True), Infer(), Restore(), NEXT)
RESUME = (Train(step=True), Save(), Train(batch=1, step=True), Load(), Train(step=True))

SHOWN = (
    *(
        Shown(
            id=f"{strategy}-gathered-after-inference",
            case=case_of(strategy, Infer(), Train()),
            found_by="device-memory-matches-oracle",
            device="sim",
        )
        for strategy in get_args(Strategy)
    ),
    Shown(
        id="fsdp1-zeroes-gradients-without-order",
        case=case_of("fsdp1", Train(), model=Model(family="mlp", lora_rank=1)),
        found_by="device-order-is-kept",
        device="sim",
    ),
    Shown(
        id="fsdp1-gradients-outlive-zero-grad",
        case=case_of("fsdp1", Train(), NEXT),
        found_by="device-memory-matches-oracle",
        device="sim",
    ),
    Shown(id="fsdp1-one-shard-never-averages", case=case_of("fsdp1", mesh=(2, 1))),
    Shown(
        id="fsdp1-one-shard-never-averages",
        case=case_of("fsdp1", mesh=(2, 1)),
        found_by="replicas-agree",
    ),
    Shown(
        id="fsdp1-no-shard-rounds-running-sum",
        case=case_of("fsdp1", mesh=(1,), dtypes="fp32/bf16/bf16"),
    ),
    Shown(
        id="fsdp1-clip-refuses-double",
        case=case_of("fsdp1", Train(step=True), dtypes="fp64"),
        found_by="norm-and-clip-match-oracle",
    ),
    Shown(
        id="fsdp1-norm-rounded-on-some-ranks",
        case=case_of(
            "fsdp1",
            Train(step=True),
            model=Model(family="mlp", width=1, vocab=2, frozen="first_unit"),
            mesh=(3,),
            dtypes="bf16/bf16/fp32",
        ),
        found_by="norm-and-clip-match-oracle",
    ),
    Shown(
        id="fsdp1-no-shard-tied-and-frozen",
        case=case_of("fsdp1", mesh=(1,), model=replace(TIED, lora_rank=2)),
    ),
    Shown(
        id="fsdp1-no-shard-exports-no-frozen-root",
        case=case_of("fsdp1", Train(), Export(), mesh=(1,), model=replace(MLP, lora_rank=2)),
    ),
    Shown(
        id="fsdp1-no-shard-tied-in-low-precision",
        case=case_of("fsdp1", mesh=(1,), model=TIED, dtypes=MIXED, deferred=True),
    ),
    Shown(
        id="fsdp1-deferred-unit-not-in-the-last",
        case=case_of("fsdp1", model=UNIT, gates=ONLY_FIRST, deferred=True),
    ),
    Shown(
        id="fsdp1-no-shard-unit-not-in-the-last",
        case=case_of(
            "fsdp1", mesh=(1,), model=UNIT, gates=ONLY_FIRST[:1], dtypes=MIXED, deferred=True
        ),
    ),
    Shown(
        id="fsdp1-steps-what-was-not-used",
        case=case_of("fsdp1", Train(step=True), model=PARAMETER, gates=NEVER),
        found_by="unused-parameters-stay",
    ),
    Shown(
        id="fsdp1-interrupted-batch-stays",
        case=case_of("fsdp1", Interrupt(phase="forward", micro_batch=1), NEXT, deferred=True),
        found_by="interrupted-batch-changes-nothing",
    ),
    Shown(id="fsdp1-restore-while-gathered", case=case_of("fsdp1", *RESTORE)),
    Shown(
        id="fsdp2-fresh-gradient-in-the-last",
        case=case_of("fsdp2", model=PARAMETER, gates=ONLY_LAST, dtypes=MIXED, deferred=True),
    ),
    Shown(
        id="fsdp2-accumulates-what-never-ran",
        case=case_of("fsdp2", model=UNIT, gates=ONLY_LAST, dtypes=MIXED, deferred=True),
    ),
    Shown(
        id="fsdp2-sizes-differ-between-ranks",
        case=case_of("fsdp2", model=PARAMETER, gates=ON_RANK_0),
    ),
    Shown(
        id="fsdp2-mixes-what-ranks-use",
        case=case_of("fsdp2", model=EITHER, gates=((True, False), (False, True))),
    ),
    Shown(
        id="fsdp2-mixes-what-ranks-use",
        case=case_of(
            "fsdp2",
            Train(step=True),
            mesh=(3,),
            model=EITHER,
            gates=((False, True), (True, True), (True, True)),
        ),
    ),
    Shown(
        id="fsdp2-unfrozen-after-first-forward",
        case=case_of("fsdp2", Train(), Unfreeze(), NEXT, model=FROZEN, dtypes=MIXED),
    ),
    Shown(
        id="fsdp2-frozen-or-unfrozen-while-gathered",
        case=case_of("fsdp2", Infer(), Freeze(), NEXT, reshard_after_forward=False),
    ),
    Shown(
        id="fsdp2-interrupted-batch-stays",
        case=case_of("fsdp2", Interrupt(phase="loss", micro_batch=1), NEXT, deferred=True),
    ),
    Shown(id="fsdp2-restore-while-gathered", case=case_of("fsdp2", *RESTORE)),
    *(
        Shown(
            id=f"{strategy}-unused-stays-gathered",
            case=case_of(
                strategy, Infer(), Train(), model=UNIT, gates=ONLY_LAST, reshard_after_forward=False
            ),
            found_by="retained-bytes-match",
        )
        for strategy in get_args(Strategy)
    ),
    *(
        Shown(
            id="accelerate-fsdp1-loads-no-state-without-rows",
            case=case_of("fsdp1", *RESUME, mesh=(3,), reshard_after_forward=reshard),
            found_by="resume-equals-uninterrupted",
            on="accelerate",
        )
        for reshard in (True, False)
    ),
    *(
        Shown(
            id="accelerate-fsdp1-resumes-without-moments",
            case=case_of("fsdp1", Train(step=True), Save(), Load(fresh=True), NEXT, mesh=mesh),
            found_by="resume-equals-uninterrupted",
            on="accelerate",
        )
        for mesh in ((1,), (2,))
    ),
)

MAY_SHOW = (
    Shown(
        id="fsdp1-no-shard-tied-and-frozen",
        case=case_of(
            "fsdp1",
            Train(),
            NEXT,
            mesh=(2, 1),
            model=replace(TIED, lora_rank=2),
            dtypes="bf16/bf16/fp32",
        ),
    ),
)
"""Cases in which an issue shows although it need not: it is known there as well."""

"""Observations made from predictions, to be spoilt in one thing, and runs that return them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdp_engine.adapters.numerics import fsdp1_numerics, fsdp2_numerics
from fsdp_engine.contract.actions import Action, Export, Infer, Resume, Train
from fsdp_engine.contract.batch import Batch, Sequence, Static
from fsdp_engine.contract.case import DTYPE_POLICIES, Case, EngineOptions, Mesh, Scalar, Strategy
from fsdp_engine.contract.model import Model
from fsdp_engine.contract.observation import (
    ExportedTensor,
    ExportRecord,
    InferRecord,
    LocalArray,
    ModuleState,
    Numerics,
    Observation,
    RankObservation,
    Record,
    Replicate,
    Residency,
    StateRecord,
    TrainRecord,
)
from fsdp_engine.contract.protocol import Answer, Capabilities, EngineTables
from fsdp_engine.workload.models import build_model
from oracles.arrays import array_of
from oracles.export import Exported, predict
from oracles.memory import predict_held
from oracles.planner import consecutive
from oracles.schedule import predict_schedule

WORKED_MODEL = Model(family="embedding", units=2, width=8, hidden=12, vocab=61, bias=True)
"""The example of the tables: units of 212 parameters, a root of 1037, 1461 in all."""


def worked_case(  # noqa: PLR0913  one per thing that the tables vary
    *,
    strategy: Strategy = "fsdp2",
    shape: tuple[int, ...] = (2,),
    dtypes: str = "fp32/bf16/fp32",
    reshard: bool = True,
    deferred: bool = False,
    micro_batches: int = 2,
    model: Model = WORKED_MODEL,
    program: tuple[Action, ...] = (Train(),),
) -> Case:
    """A case of so many micro-batches of one sequence on every rank."""
    mesh = Mesh(shape=shape)
    return Case(
        mesh=mesh,
        model=model,
        dtypes=DTYPE_POLICIES[dtypes],
        engine=EngineOptions(
            strategy=strategy,
            reshard_after_forward=reshard,
            deferred=deferred,
            planning=Static(sequences=1),
        ),
        batches=(
            Batch(
                ranks=tuple(
                    tuple(
                        Sequence(key=rank * micro_batches + place) for place in range(micro_batches)
                    )
                    for rank in range(mesh.world_size)
                )
            ),
        ),
        program=program,
    )


def numerics_of(case: Case) -> Numerics:
    """What plain torch declares for the case."""
    return (fsdp1_numerics if case.engine.strategy == "fsdp1" else fsdp2_numerics)(case)


def observed(case: Case) -> Observation:
    """What a faultless engine would show. Values of gradients and losses are left out."""
    return Observation(
        numerics=numerics_of(case),
        ranks=tuple(
            RankObservation(
                rank=rank,
                initial=_parameters(case),
                records=tuple(_record(case, rank, action) for action in case.program),
                build_collectives=(),
            )
            for rank in range(case.mesh.world_size)
        ),
    )


def spoilt(
    observation: Observation, rank: int, index: int, change: Callable[[Record], Record]
) -> Observation:
    """The observation with one record of one rank changed."""
    ranks = list(observation.ranks)
    records = list(ranks[rank].records)
    records[index] = change(records[index])
    ranks[rank] = dataclasses.replace(ranks[rank], records=tuple(records))
    return dataclasses.replace(observation, ranks=tuple(ranks))


def everywhere(
    observation: Observation, index: int, change: Callable[[Record], Record]
) -> Observation:
    """The observation with one record of every rank changed."""
    for rank in range(len(observation.ranks)):
        observation = spoilt(observation, rank, index, change)
    return observation


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """A run that answers with data: `observe` by case, and fixed tables."""

    observe: Callable[[Case], Observation] = observed
    defaults: dict[str, dict[str, Scalar]] = dataclasses.field(default_factory=dict)
    mesh_answer: Callable[[int, int], Answer] = lambda *_: Answer(value=None)
    strategy_answer: Callable[[int, bool], Answer] = lambda *_: Answer(value=None)

    def __call__(self, case: Case) -> Observation:
        return self.observe(case)

    def tables(
        self,
        *,
        mesh_shapes: tuple[tuple[int, int], ...] = (),
        strategies: tuple[tuple[int, bool], ...] = (),
    ) -> EngineTables:
        return EngineTables(
            capabilities=Capabilities(name="answers", versions={}, strategies=(), actions=()),
            defaults=self.defaults,
            mesh_shapes=tuple(self.mesh_answer(*question) for question in mesh_shapes),
            strategies=tuple(self.strategy_answer(*question) for question in strategies),
        )


def showing(observation: Observation) -> Answers:
    """A run that shows this for every case."""
    return Answers(observe=lambda _: observation)


def _record(case: Case, rank: int, action: Action) -> Record:
    match action:
        case Train():
            return _train(case, rank, action)
        case Infer():
            empty = array_of(build_model(case).state_dict()["head.weight"])
            return InferRecord(token_losses=empty, collectives=())
        case Export():
            return _export(case, action, skipped=0)
        case Resume():
            held = next(a for a in case.program if isinstance(a, Export) and a.drain == "hold")
            return _export(
                case, dataclasses.replace(held, drain="full", after=0), skipped=held.after
            )
        case _:
            return _state(case)


def _train(case: Case, rank: int, action: Train) -> TrainRecord:
    plan = consecutive(len(case.batches[action.batch].ranks[rank]), 1)
    gated, deferred = (True,) * len(plan), case.engine.deferred
    numerics = numerics_of(case)
    return TrainRecord(
        plan=plan,
        total_loss=1.0,
        gradients=(),
        norm=1.0 if action.step else None,
        stepped=action.step,
        lr=0.125 if action.step else None,
        parameters=_parameters(case) if action.step else (),
        collectives=predict_schedule(case, numerics, gated, deferred=deferred).collectives,
        residency=tuple(
            Residency(
                moment=held.moment,
                micro_batch=held.micro_batch,
                unsharded=tuple(sorted(held.unsharded)),
                retained_gradient_bytes=held.gradient_bytes,
                retained_parameter_bytes=held.parameter_bytes,
            )
            for held in predict_held(case, numerics, gated, deferred=deferred)
        ),
        notes=(),
    )


def _state(case: Case) -> StateRecord:
    flags = {name: p.requires_grad for name, p in build_model(case).named_parameters()}
    return StateRecord(
        training=True,
        requires_grad=flags,
        parameters=_parameters(case),
        optimizer_state={},
        collectives=(),
    )


def _export(case: Case, action: Export, *, skipped: int) -> ExportRecord:
    """The names from the one at `skipped` on, as far as the action takes them."""
    state = ModuleState(training=False, requires_grad={}, devices={}, parameters=_parameters(case))
    weights = {name: p.detach() for name, p in build_model(case).named_parameters()}
    wanted = predict(case, weights, action)
    stop = len(wanted.tensors) if action.drain == "full" else action.after
    return ExportRecord(
        tensors=tuple(
            ExportedTensor(name=name, device="cpu", value=array_of(_value(wanted, name)))
            for name in list(wanted.tensors)[skipped:stop]
        ),
        before=state,
        after=state,
        collectives=(),
    )


def _value(wanted: Exported, name: str) -> Tensor:
    like = wanted.tensors[name]
    bound = wanted.bounds.get(name)
    return like if bound is None else torch.from_numpy(bound.value).to(like.dtype)


def _parameters(case: Case) -> tuple[LocalArray, ...]:
    return tuple(
        LocalArray(
            name=name,
            full_shape=tuple(parameter.shape),
            placement=Replicate(),
            data=array_of(parameter),
        )
        for name, parameter in build_model(case).named_parameters()
    )

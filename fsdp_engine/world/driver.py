"""Interprets a case's program for any engine on one rank, and writes down what it shows.

For a training action: train mode, clear gradients, forward and backward, gradients, then where the
action says so the step, the schedule and the parameters.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fsdp_engine.contract.case import Action, Case, Export, Infer, Train
from fsdp_engine.contract.observation import (
    Array,
    ExportedTensor,
    ExportRecord,
    InferRecord,
    LocalArray,
    ModuleState,
    RankObservation,
    Record,
    TrainRecord,
)
from fsdp_engine.contract.protocol import Engine, LocalShard, RankContext, Trainee
from fsdp_engine.torch_private.shards import plain_name
from fsdp_engine.workload.batches import local_batch
from fsdp_engine.workload.losses import token_loss
from fsdp_engine.world.recorder import Recorder


def drive(engine: Engine, case: Case, rank: RankContext, recorder: Recorder) -> RankObservation:
    """Build the trainee, run the program. Whatever the engine raises passes through."""
    trainee = engine.build(case, rank)
    build_collectives, _ = recorder.take()
    with recorder.during("other"):
        initial = _arrays(trainee.parameters())
    recorder.take()
    with recorder.watching(trainee.module):
        records = tuple(_record(trainee, case, rank, action, recorder) for action in case.program)
    return RankObservation(
        rank=rank.rank, initial=initial, records=records, build_collectives=build_collectives
    )


def _record(
    trainee: Trainee, case: Case, rank: RankContext, action: Action, recorder: Recorder
) -> Record:
    recorder.take()
    match action:
        case Train():
            return _train(trainee, case, rank, action, recorder)
        case Infer():
            return _infer(trainee, case, rank, action, recorder)
        case Export():
            return _export(trainee, action, recorder)


def _train(
    trainee: Trainee, case: Case, rank: RankContext, action: Train, recorder: Recorder
) -> TrainRecord:
    batch = local_batch(case, action.batch, rank.rank)
    step = lr = None
    parameters: tuple[LocalArray, ...] = ()
    with recorder.during("other"), trainee.mode("train"):
        trainee.zero_grad()
        with recorder.during("plan"):
            losses = trainee.forward_backward(batch, token_loss(case))
        gradients = _arrays(trainee.gradients())
        if action.step:
            with recorder.during("step"):
                step = trainee.step()
                lr = trainee.lr_step()
            parameters = _arrays(trainee.parameters())
    collectives, residency = recorder.take()
    return TrainRecord(
        plan=losses.plan,
        total_loss=losses.total,
        gradients=gradients,
        norm=None if step is None else step.norm,
        stepped=step is not None and step.stepped,
        lr=lr,
        parameters=parameters,
        collectives=collectives,
        residency=residency,
        notes=losses.notes,
    )


def _infer(
    trainee: Trainee, case: Case, rank: RankContext, action: Infer, recorder: Recorder
) -> InferRecord:
    batch = local_batch(case, action.batch, rank.rank)
    with recorder.during("other"), trainee.mode("eval"):
        token_losses = trainee.infer(batch, token_loss(case))
    collectives, _ = recorder.take()
    return InferRecord(token_losses=as_array(token_losses), collectives=collectives)


def _export(trainee: Trainee, action: Export, recorder: Recorder) -> ExportRecord:
    before = _state(trainee)
    recorder.take()
    with recorder.during("export"):
        tensors = tuple(
            ExportedTensor(name=name, device=str(tensor.device), value=as_array(tensor))
            for name, tensor in trainee.export(action)
        )
    collectives, _ = recorder.take()
    return ExportRecord(
        tensors=tensors, before=before, after=_state(trainee), collectives=collectives
    )


def _state(trainee: Trainee) -> ModuleState:
    module = trainee.module
    parameters = {plain_name(name): value for name, value in module.named_parameters()}
    buffers = {plain_name(name): value for name, value in module.named_buffers()}
    return ModuleState(
        training=module.training,
        requires_grad={name: value.requires_grad for name, value in parameters.items()},
        devices={name: str(value.device) for name, value in {**parameters, **buffers}.items()},
        parameters=_arrays(trainee.parameters()),
    )


def _arrays(shards: Iterable[LocalShard]) -> tuple[LocalArray, ...]:
    return tuple(
        LocalArray(
            name=shard.name,
            full_shape=tuple(shard.full_shape),
            placement=shard.placement,
            data=None if shard.data is None else as_array(shard.data),
        )
        for shard in shards
    )


def as_array(tensor: Tensor) -> Array:
    """A copy of a dense tensor as data."""
    plain = tensor.detach().to("cpu").contiguous()
    return Array(
        dtype=str(plain.dtype).removeprefix("torch."),
        shape=tuple(plain.shape),
        data=plain.reshape(-1).view(torch.uint8).numpy().tobytes(),
    )

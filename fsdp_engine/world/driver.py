"""Interprets a case's program for any engine on one rank, and writes down what it shows.

For a training action: train mode, clear gradients, forward and backward, gradients, then where the
action says so the step, the clipped gradients, the schedule, the parameters and optimizer state.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from fsdp_engine.contract.actions import (
    Action,
    Eval,
    Export,
    Freeze,
    Infer,
    Interrupt,
    Load,
    Move,
    Poison,
    Reject,
    Restore,
    Resume,
    Save,
    Train,
    Unfreeze,
)
from fsdp_engine.contract.case import Case, case_behind
from fsdp_engine.contract.observation import (
    ExportRecord,
    InferRecord,
    LocalArray,
    OptimizerState,
    RankObservation,
    Record,
    Resting,
    StateRecord,
    TrainRecord,
)
from fsdp_engine.contract.protocol import (
    Checkpointing,
    Engine,
    LocalShard,
    Offloading,
    RankContext,
    StepResult,
    TokenLoss,
)
from fsdp_engine.workload.batches import LocalBatch, local_batch
from fsdp_engine.workload.losses import token_loss
from fsdp_engine.workload.models import part_names, unit_names
from fsdp_engine.world import reading
from fsdp_engine.world.consumer import Consumer, as_array
from fsdp_engine.world.damage import damaged_copy, damaged_path
from fsdp_engine.world.injection import Interruption, is_injected, poisoned
from fsdp_engine.world.recorder import Recorder


def drive(engine: Engine, case: Case, rank: RankContext, recorder: Recorder) -> RankObservation:
    """Build the trainee, run the program. Whatever the engine raises passes through."""
    run = _Run(engine, case, rank, recorder)
    build_collectives, _ = recorder.take()
    initial, training = run.begin()
    recorder.take_copies()
    built_bytes = recorder.device_bytes()
    resting = [run.resting()]
    records: list[Record] = []
    with run.watching:
        for action in case.program:
            records.append(run.record(action))
            resting.append(run.resting())
    return RankObservation(
        rank=rank.rank,
        initial=initial,
        records=tuple(records),
        build_collectives=build_collectives,
        training=training,
        device=rank.device,
        built_bytes=built_bytes,
        resting=tuple(filter(None, resting)),
    )


class _Run:
    """One program on one rank. A resume may exchange the trainee, and the case's mesh with it."""

    def __init__(self, engine: Engine, case: Case, rank: RankContext, recorder: Recorder) -> None:
        self._engine = engine
        self._case = case
        self._context = rank
        self._rank = rank.rank
        self._recorder = recorder
        self._trainee = engine.build(case, rank)
        self._start: tuple[LocalShard, ...] = ()
        self.watching = ExitStack()

    def begin(self) -> tuple[tuple[LocalArray, ...], bool]:
        """Parameters and mode as they were built; from here on forwards are seen."""
        trainee, recorder = self._trainee, self._recorder
        with recorder.during("other"):
            self._start = reading.copies(trainee.parameters())
        recorder.take()
        self.watching.enter_context(recorder.watching(trainee.module))
        self._consumer = Consumer(trainee, aside=lambda: recorder.during("other"))
        return reading.arrays(self._start), trainee.module.training

    def record(self, action: Action) -> Record:
        """Run one action."""
        self._recorder.take()
        match action:
            case Train():
                return self._train(action.batch, token_loss(self._case), step=action.step)
            case Poison():
                loss = poisoned(token_loss(self._case), action, self._rank)
                return self._train(action.batch, loss, step=True)
            case Infer():
                return self._infer(action)
            case Export() | Resume():
                return self._export(action)
            case Interrupt():
                return self._interrupt(action)
            case Save() | Load() | Reject():
                return self._checkpoint(action)
            case _:
                self._recorder.take_copies()
                with self._recorder.during("move" if isinstance(action, Move) else "other"):
                    self._change(action)
                return replace(self._state_record(), copies=self._recorder.take_copies())

    def _change(self, action: Eval | Freeze | Unfreeze | Restore | Move) -> None:
        trainee = self._trainee
        match action:
            case Eval():
                with trainee.mode("eval"):
                    pass
            case Freeze():
                trainee.freeze(part_names(self._case, action.part))
            case Unfreeze():
                trainee.unfreeze(part_names(self._case, action.part))
            case Restore():
                trainee.restore(self._start)
            case Move():
                assert isinstance(trainee, Offloading), "its engine says that it moves"
                to = "cpu" if action.to == "host" else self._context.device
                trainee.to(to, model=action.model, optimizer=action.optimizer, grad=action.model)

    def resting(self) -> Resting | None:
        """Where everything is now; None on the host, where there is nothing to tell."""
        if self._context.device == "cpu":
            return None
        return reading.resting(self._trainee, device_bytes=self._recorder.device_bytes())

    def _checkpoint(self, action: Save | Load | Reject) -> StateRecord:
        """Random numbers are drawn, so that every rank's go on by another count."""
        folder = Path(self._context.directory, "checkpoints")
        random, raised = "", ""
        with self._recorder.during("other"):
            torch.rand(1 + self._rank)
            match action:
                case Save():
                    random = reading.random_digest()
                    self._saver.save(str(folder), max_to_keep=action.max_to_keep or None)
                case Load():
                    if action.fresh:
                        self._rebuild(case_behind(self._case, action))
                    self._saver.load(str(folder))
                    random = reading.random_digest()
                case Reject():
                    raised = self._reject(action, folder)
        return replace(self._state_record(raised=raised), random=random)

    def _rebuild(self, case: Case) -> None:
        self.watching.close()
        self._recorder.move(case.mesh)
        self._case = case
        self._trainee = self._engine.build(case, self._context)
        self.begin()

    def _reject(self, action: Reject, folder: Path) -> str:
        if self._rank == 0:
            damaged_copy(folder, action)
        dist.barrier()
        try:
            self._saver.load(str(damaged_path(folder)))
        except Exception as error:  # noqa: BLE001  a check judges what it is
            return type(error).__name__
        return ""

    @property
    def _saver(self) -> Checkpointing:
        trainee = self._trainee
        assert isinstance(trainee, Checkpointing), "its engine says that it saves and loads"
        return trainee

    def _train(self, batch: int, loss: TokenLoss, *, step: bool) -> TrainRecord:
        trainee, recorder = self._trainee, self._recorder
        result: StepResult | None = None
        lr = None
        parameters: tuple[LocalArray, ...] = ()
        clipped: tuple[LocalArray, ...] = ()
        optimizer_state: OptimizerState = {}
        with recorder.during("other"), ExitStack() as mode:
            with recorder.during("enter"):
                mode.enter_context(trainee.mode("train"))
            trainee.zero_grad()
            before = recorder.device_bytes()
            with recorder.during("plan"):
                losses = trainee.forward_backward(self._local(batch), loss)
            gradients = reading.arrays(trainee.gradients())
            if step:
                with recorder.during("step"):
                    result = trainee.step()
                    lr = trainee.lr_step()
                clipped = reading.arrays(trainee.gradients())
                parameters = reading.arrays(trainee.parameters())
                optimizer_state = reading.optimizer_state(trainee)
            metrics = trainee.metrics()
            after = recorder.device_bytes()
            with recorder.during("leave"):
                mode.close()
        collectives, residency = recorder.take()
        return TrainRecord(
            plan=losses.plan,
            total_loss=losses.total,
            gradients=gradients,
            norm=None if result is None else result.norm,
            stepped=result is not None and result.stepped,
            lr=lr,
            parameters=parameters,
            collectives=collectives,
            residency=residency,
            notes=losses.notes,
            clipped=clipped,
            optimizer_state=optimizer_state,
            metrics=metrics,
            copies=recorder.take_copies(),
            device_bytes=(before, after),
        )

    def _infer(self, action: Infer) -> InferRecord:
        trainee, recorder = self._trainee, self._recorder
        with recorder.during("other"), trainee.mode("eval"), self._adapter(action):
            token_losses = trainee.infer(self._local(action.batch), token_loss(self._case))
        collectives, _ = recorder.take()
        return InferRecord(token_losses=as_array(token_losses), collectives=collectives)

    def _adapter(self, action: Infer) -> AbstractContextManager[None]:
        match action.adapter:
            case "off":
                return self._trainee.disable_adapter()
            case "merged":
                return self._trainee.merge_adapter()
            case _:
                return nullcontext()

    def _export(self, action: Export | Resume) -> ExportRecord:
        trainee, recorder = self._trainee, self._recorder
        before = reading.module_state(trainee)
        recorder.take()
        recorder.take_copies()
        with recorder.during("export"):
            tensors, raised = self._consumer.consume(action)
        collectives, _ = recorder.take()
        copies = recorder.take_copies()
        return ExportRecord(
            raised=raised,
            tensors=tensors,
            before=before,
            after=reading.module_state(trainee),
            collectives=collectives,
            copies=copies,
        )

    def _interrupt(self, action: Interrupt) -> StateRecord:
        trainee, recorder = self._trainee, self._recorder
        interruption = Interruption(action, unit_names(self._case))
        loss = interruption.in_loss(token_loss(self._case))
        raised = ""
        try:
            with (
                recorder.during("other"),
                interruption.watching(trainee.module),
                trainee.mode("train"),
            ):
                trainee.zero_grad()
                with recorder.during("plan"):
                    trainee.forward_backward(self._local(action.batch), loss)
        except Exception as error:
            if not interruption.happened:
                raise
            raised = "InjectedFailure" if is_injected(error) else type(error).__name__
        return self._state_record(raised=raised, injected=interruption.happened)

    def _state_record(self, *, raised: str = "", injected: bool = False) -> StateRecord:
        state = reading.module_state(self._trainee)
        optimizer_state = reading.optimizer_state(self._trainee)
        collectives, _ = self._recorder.take()
        return StateRecord(
            raised=raised,
            injected=injected,
            training=state.training,
            requires_grad=state.requires_grad,
            parameters=state.parameters,
            optimizer_state=optimizer_state,
            collectives=collectives,
        )

    def _local(self, batch: int) -> LocalBatch:
        return local_batch(self._case, batch, self._rank)

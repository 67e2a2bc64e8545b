"""Reading an observation: the training actions of a case and what each rank recorded of them."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_engine.contract.case import Case
from fsdp_engine.contract.observation import Observation, Phase, TrainRecord
from fsdp_engine.contract.protocol import EAGER_FALLBACK

PASSES: tuple[Phase, ...] = ("forward", "backward")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainAction:
    """One training action of the program: its place, its batch, every rank's record in order.

    `after_training`: it is the first action or right after another training action.
    `frozen_as_built`: no freeze or unfreeze came before.
    """

    index: int
    batch: int
    records: tuple[TrainRecord, ...]
    after_training: bool
    frozen_as_built: bool

    def __str__(self) -> str:
        return f"action {self.index} (train)"

    @property
    def fell_back(self) -> bool:
        """Whether any rank says that the engine ran the batch with eager sync instead."""
        return any(EAGER_FALLBACK in note for record in self.records for note in record.notes)

    def first_forward(self, rank: int) -> int:
        """The root forward with which the run that counts begins: 0 without a fall-back.

        A fall-back runs all micro-batches again after an attempt that was abandoned.
        """
        if not self.fell_back:
            return 0
        record = self.records[rank]
        passes = [c.micro_batch for c in record.collectives if c.phase in PASSES]
        passes += [held.micro_batch for held in record.residency]
        return max(passes, default=0) + 1 - len(record.plan)


def train_actions(case: Case, observation: Observation) -> tuple[TrainAction, ...]:
    """The program's training actions, those with a non-finite loss left out."""
    actions = []
    previous = "train"
    frozen_as_built = True
    for index, action in enumerate(case.program):
        if action.kind == "train":
            records = []
            for rank in observation.ranks:
                record = rank.records[index]
                assert isinstance(record, TrainRecord)
                records.append(record)
            actions.append(
                TrainAction(
                    index=index,
                    batch=action.batch,
                    records=tuple(records),
                    after_training=previous == "train",
                    frozen_as_built=frozen_as_built,
                )
            )
        previous = action.kind
        frozen_as_built &= action.kind not in ("freeze", "unfreeze")
    return tuple(actions)


def actions_as_built(case: Case, observation: Observation) -> tuple[TrainAction, ...]:
    """The training actions up to the first freeze or unfreeze."""
    actions = train_actions(case, observation)
    return tuple(action for action in actions if action.frozen_as_built)


def gates(case: Case, action: TrainAction) -> tuple[tuple[bool, ...], ...]:
    """For each rank and micro-batch: whether any of its sequences uses the optional part."""
    return tuple(
        tuple(any(sequences[index].gated for index in indices) for indices in record.plan)
        for sequences, record in zip(case.batches[action.batch].ranks, action.records, strict=True)
    )


def uniform_gates(case: Case, action: TrainAction) -> tuple[bool, ...] | None:
    """The gates that all ranks share; None where they differ.

    A case without an optional part is gated throughout. With one of two parts in use the gates say
    too little: None as well.
    """
    if case.model.optional == "either":
        return None
    if case.model.optional == "none":
        counts = {len(record.plan) for record in action.records}
        return (True,) * counts.pop() if len(counts) == 1 else None
    by_rank = set(gates(case, action))
    return by_rank.pop() if len(by_rank) == 1 else None

"""What ranks take of an export, at once or in parts, held against what it must yield."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from fsdp_engine.contract.actions import Export, Load, Restore
from fsdp_engine.contract.observation import ExportedTensor, ExportRecord, TrainRecord
from oracles.arrays import array_of, dtype_name, float64_of, tensor_of
from oracles.bitwise import array_mismatches
from oracles.compare import compare_within
from oracles.export import Exported
from oracles.findings import Findings
from oracles.metamorphic import told_mismatches
from oracles.moments import Moment
from oracles.running_error import Bounded
from oracles.verdict import Mismatch

REFUSED = "EngineStateError"


def writes(moment: Moment) -> bool:
    """Whether the action wrote to the weights, so that an earlier export is out of date."""
    stepped = any(isinstance(record, TrainRecord) and record.stepped for record in moment.records)
    return stepped or isinstance(moment.action, Restore | Load)


@dataclass(slots=True, kw_only=True)
class Taking:
    """One export of every rank: what it must yield and the names taken so far, by rank.

    `devices` are those of the ranks. `is_outdated`: weights were written since the call, so that it
    may refuse to go on.
    """

    wanted: Exported
    devices: tuple[str, ...]
    is_outdated: bool = False
    taken: list[list[str]] = field(default_factory=list)

    def judge(self, moment: Moment, findings: Findings) -> None:
        """The export action itself, or the resume action that takes the rest."""
        if not self.taken:
            self.taken = [[] for _ in self.devices]
        for rank, record in enumerate(moment.records):
            assert isinstance(record, ExportRecord)
            where = f"{moment} rank {rank}"
            names = self.taken[rank]
            names += [tensor.name for tensor in record.tensors]
            may_refuse = self.is_outdated and record.raised == REFUSED
            if not may_refuse:
                findings.include(told_mismatches(f"{where} raised", record.raised, ""), 0.0)
                findings.include(self._count_mismatches(where, names, _limit(moment, self)), 0.0)
            findings.include(_name_mismatches(where, names, self.wanted), 0.0)
            for tensor in record.tensors:
                if tensor.name in self.wanted.tensors:
                    self._judge_value(where, tensor, self.devices[rank], findings)
        findings.include(self._order_mismatches(moment), 0.0)

    def _count_mismatches(self, where: str, names: list[str], limit: int) -> list[Mismatch]:
        if limit < len(self.wanted.tensors):
            return told_mismatches(f"{where} number of tensors", len(names), limit)
        return [
            Mismatch(where=f"{where} {name}", got="0 times", wanted="once")
            for name in self.wanted.tensors
            if name not in names
        ]

    def _judge_value(
        self, where: str, got: ExportedTensor, device: str, findings: Findings
    ) -> None:
        place = f"{where} {got.name}"
        wanted = self.wanted.tensors[got.name]
        bound = self.wanted.bounds.get(got.name)
        if bound is None:
            findings.include(array_mismatches(place, got.value, array_of(wanted)), 0.0)
        else:
            judge_bounded(place, got, wanted, bound, findings)
        if got.device != device:
            told = Mismatch(where=f"{place} device", got=got.device, wanted=device)
            findings.include([told], 0.0)

    def _order_mismatches(self, moment: Moment) -> list[Mismatch]:
        for rank, order in enumerate(self.taken):
            for index, (got, first) in enumerate(zip(order, self.taken[0], strict=False)):
                if got != first:
                    place = f"{moment} rank {rank} tensor {index}"
                    return [Mismatch(where=place, got=got, wanted=f"{first} as on rank 0")]
        return []


def judge_bounded(
    place: str, got: ExportedTensor, like: Tensor, bound: Bounded, findings: Findings
) -> None:
    """An exported tensor of the dtype and shape of `like`, with values within a bound."""
    shown = (got.value.dtype, got.value.shape)
    wanted = (dtype_name(like.dtype), tuple(like.shape))
    if shown != wanted:
        findings.include(told_mismatches(f"{place} dtype and shape", shown, wanted), 0.0)
        return
    values = float64_of(tensor_of(got.value))
    findings.add(compare_within(values, bound.value, bound.error, where=place))


def _limit(moment: Moment, taking: Taking) -> int:
    """How many tensors must have been taken once the action is done."""
    everything = len(taking.wanted.tensors)
    if isinstance(moment.action, Export) and moment.action.drain != "full":
        return min(moment.action.after, everything)
    return everything


def _name_mismatches(where: str, got: list[str], wanted: Exported) -> list[Mismatch]:
    mismatches = [
        Mismatch(where=f"{where} {name}", got=f"{got.count(name)} times", wanted="once")
        for name in dict.fromkeys(got)
        if got.count(name) > 1 and name in wanted.tensors
    ]
    mismatches += [
        Mismatch(where=f"{where} {name}", got="exported", wanted="no such name")
        for name in dict.fromkeys(got)
        if name not in wanted.tensors
    ]
    return mismatches

"""From the first accusation to the smallest case that is accused for the same reason."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import hypothesis

from fsdp_engine.contract.actions import BATCH_ACTIONS, Action, Train
from fsdp_engine.contract.batch import Static
from fsdp_engine.contract.case import DTYPE_POLICIES, Case
from fsdp_engine.contract.case_file import case_id
from fsdp_engine.contract.errors import UnsupportedCase
from fsdp_engine.contract.protocol import Run
from properties.catalog import Check, property_id
from properties.judge import MAX_HANGS, PropertyFailure, failure_class
from properties.outcome import ending_of
from properties.tally import Tally
from tests.detection.search import Item, Searching, SuiteTest


@dataclass(frozen=True, slots=True, kw_only=True)
class Minimal:
    """Where shrinking ended: seconds and executed cases since the first failure."""

    case: Case
    seconds: float
    num_cases: int


@dataclass(slots=True, kw_only=True)
class Shrinking:
    """Stands in for the judge: it fails as the judge does, without a second, fresh world."""

    run: Run
    tallies: dict[str, Tally] = field(default_factory=dict)
    smallest: Case | None = None
    first_failure: float = 0.0
    num_cases: int = 0
    _known: dict[str, type[PropertyFailure] | None] = field(default_factory=dict)
    _hangs: int = 0

    def __call__(self, check: Check, case: Case) -> None:
        key = case_id(case)
        if key not in self._known:
            if self._hangs >= MAX_HANGS:
                hypothesis.reject()
            self._known[key] = self._failure(check, case)
            self.num_cases += bool(self.first_failure)
        failure = self._known[key]
        if failure is not None:
            self.first_failure = self.first_failure or time.monotonic()
            self.smallest = case
            # One line for all: the search tells failures apart by the line too.
            raise failure(f"case {key[:12]}\n")

    def settled(self, failure: PropertyFailure) -> PropertyFailure:
        """As it is: the case is what counts, not what is told of it."""
        return failure

    def _failure(self, check: Check, case: Case) -> type[PropertyFailure] | None:
        try:
            ending = ending_of(check, case, self.run)
        except UnsupportedCase:
            return None
        self._hangs += ending.how == "Hung"
        if ending.verdict.outcome in ("pass", "not_applicable"):
            return None
        return failure_class(property_id(check), ending.how)


def shrink(test: SuiteTest, item: Item, run: Run, searching: Searching) -> Minimal:
    """Let the suite's own search end at its smallest case.

    `item` is one in which a search with the same seed saw an accusation.
    """
    shrinking = Shrinking(run=run)
    try:
        searching.run(test, item, shrinking)
    except PropertyFailure:
        ended = time.monotonic()
        assert shrinking.smallest is not None
        return Minimal(
            case=shrinking.smallest,
            seconds=ended - shrinking.first_failure,
            num_cases=shrinking.num_cases,
        )
    raise AssertionError(f"{test.name}[{item}]: nothing is accused a second time")


def phrase(case: Case) -> str:
    """A case in a line: world, units, micro-batches, dtypes, actions."""
    engine, model = case.engine, case.model
    sizes = "x".join(map(str, case.mesh.shape))
    dtypes = {policy: name for name, policy in DTYPE_POLICIES.items()}.get(case.dtypes)
    parts = [
        f"{engine.strategy} on {sizes}",
        _counted(model.units, "unit"),
        _micro_batches(case),
        dtypes or str(case.dtypes),
        model.family + "".join(f" {feature}" for feature in _features(case)),
        " ".join(map(_action, case.program)),
    ]
    return ", ".join(parts)


def _features(case: Case) -> list[str]:
    model, engine = case.model, case.engine
    return [
        name
        for name, present in {
            "bias": model.bias,
            "tied": model.tied,
            f"frozen={model.frozen}": model.frozen != "none",
            "buffers": model.buffers,
            f"optional={model.optional}": model.optional != "none",
            f"lora={model.lora_rank}": model.lora_rank,
            "zero2": not engine.reshard_after_forward,
            "deferred": engine.deferred,
            engine.config_source: engine.config_source != "dataclass",
            engine.loss_mode: engine.loss_mode != "token-mean",
            case.optimizer.kind: case.optimizer.kind != "sgd",
            "exact": case.exact,
        }.items()
        if present
    ]


def _micro_batches(case: Case) -> str:
    used = [a.batch for a in case.program if isinstance(a, BATCH_ACTIONS)] or [0]
    planning = case.engine.planning
    sizes = [len(case.batches[index].ranks[0]) for index in used]
    if isinstance(planning, Static):
        return _counted(max(sizes) // planning.sequences, "micro-batch", "es")
    return f"budget of {planning.max_tokens} tokens"


def _counted(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{plural if number != 1 else ''}"


def _action(action: Action) -> str:
    if isinstance(action, Train) and action.step:
        return "train+step"
    return action.kind

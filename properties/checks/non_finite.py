"""A loss that is not finite: no step is taken, and what follows does not know of it."""

from __future__ import annotations

from dataclasses import replace

from fsdp_engine.contract.actions import Poison
from fsdp_engine.contract.case import Case
from fsdp_engine.contract.observation import Observation, Record, TrainRecord
from fsdp_engine.contract.protocol import Run
from oracles.evaluation import Evaluator
from oracles.learning_rate import learning_rate, rate_mismatches
from oracles.metamorphic import Shorter, record_mismatches, without
from oracles.stepping import Step, finite, must_show, steps
from oracles.trajectory import still_mismatches
from oracles.verdict import Mismatch, Verdict, exactly, not_applicable


def changes_nothing(case: Case, run: Run) -> Verdict:
    """A non-finite loss on one rank stops the step on all, and is forgotten.

    The norm is non-finite and no rank steps; no gradient is left; parameters and optimizer state
    are bit for bit what they were; the schedule goes on. What follows is bit for bit what the
    program without the poisoned actions gives, as long as the learning rates are the same.
    """
    if not any(isinstance(action, Poison) for action in case.program):
        return not_applicable("no action has a non-finite loss")
    observation, evaluator = run(case), Evaluator(case)
    mismatches: list[Mismatch] = []
    for step in steps(evaluator, observation):
        if isinstance(step.moment.action, Poison):
            if step.taken and not must_show(evaluator, step.moment):
                return not_applicable("a poisoned sequence has no part in the gradient")
            mismatches += _taken_mismatches(case, step)
    shorter = without(case, ("poison",))
    if shorter is not None and not mismatches:
        mismatches = _differences(case, shorter, observation, run(shorter.case))
    return exactly(mismatches)


def _taken_mismatches(case: Case, step: Step) -> list[Mismatch]:
    """What a step that must not be taken did all the same."""
    moment = step.moment
    found: list[Mismatch] = []
    for rank, record in enumerate(step.records):
        where = f"{moment}, rank {rank}"
        if finite(record.norm):
            wanted = "nan or infinite: a loss is"
            found.append(Mismatch(where=f"{where} norm", got=repr(record.norm), wanted=wanted))
        if record.stepped:
            found.append(Mismatch(where=where, got="a step", wanted="no step on any rank"))
        found += [
            Mismatch(where=f"{where} gradient {part.name}", got="left", wanted="cleared")
            for part in record.clipped
            if part.data is not None and part.data.data  # no element is no gradient
        ]
    found += moment.mismatches
    before, after = moment.before, moment.after
    if after is not None:
        found += still_mismatches(str(moment), before, after, before.weights.keys())
    where = f"{moment} learning rate of the next step"
    rates = [record.lr for record in step.records]
    return found + rate_mismatches(where, rates, case.optimizer, before.schedule_steps + 1)[0]


def _differences(
    case: Case, shorter: Shorter, observation: Observation, clean: Observation
) -> list[Mismatch]:
    """The first action that differs from the program without the poisoned ones.

    A step that was not taken moved the schedule on. At the first step with another rate, now or
    next, what was before the update is compared, and nothing any more.
    """
    num_steps = 0
    for place, (index, action) in enumerate(zip(shorter.kept, shorter.case.program, strict=True)):
        pairs = [
            (own.records[index], alone.records[place])
            for own, alone in zip(observation.ranks, clean.ranks, strict=True)
        ]
        stepped = isinstance(pairs[0][1], TrainRecord) and pairs[0][1].norm is not None
        skipped = index - place
        same = not stepped or _same_rates(case, num_steps, num_steps + skipped)
        found = [
            mismatch
            for rank, (got, wanted) in enumerate(pairs)
            for mismatch in record_mismatches(
                f"action {index} ({action.kind}) rank {rank}, against the program without "
                "poisoned actions,",
                got if same else _before_update(got),
                wanted if same else _before_update(wanted),
            )
        ]
        if found or not same:
            return found
        num_steps += stepped
    return []


def _same_rates(case: Case, one: int, other: int) -> bool:
    """Whether the rates after so many schedule steps and after one more are the same."""
    rates = [
        [float(learning_rate(case.optimizer, steps + more).value) for more in (0, 1)]
        for steps in (one, other)
    ]
    return rates[0] == rates[1]


def _before_update(record: Record) -> Record:
    """What a training action showed, without all that depends on the learning rate."""
    assert isinstance(record, TrainRecord)
    return replace(record, lr=None, parameters=(), optimizer_state={})

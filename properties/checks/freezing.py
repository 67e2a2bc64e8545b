"""Which parameters train: frozen, unfrozen and unused ones, and those that are written back."""

from __future__ import annotations

from fsdp_engine.contract.actions import Infer, Restore
from fsdp_engine.contract.case import Case
from fsdp_engine.contract.observation import Observation, StateRecord
from fsdp_engine.contract.protocol import Run
from fsdp_engine.workload.models import unit_names, unit_of
from oracles.bitwise import part_mismatches
from oracles.evaluation import Evaluator
from oracles.findings import Findings
from oracles.gradients import judge, observed_gradients
from oracles.inference import judge_inference
from oracles.metamorphic import left_mismatches
from oracles.moments import Moment, moments
from oracles.stepping import steps
from oracles.trajectory import Trajectory, still_mismatches
from oracles.verdict import NOT_REPLAYABLE, Mismatch, Verdict, combine, exactly, not_applicable


def frozen_match_oracle(case: Case, run: Run) -> Verdict:
    """Freezing and unfreezing take effect at once, and on what was asked for only.

    Gradients behind the first freeze or unfreeze are the oracle's, absent where frozen. Frozen
    parameters and their optimizer state keep every bit, all others follow the optimizer's formula.
    `requires_grad` is recorded as asked for; values and state are not touched by the asking.
    """
    first = _first(case, "freeze", "unfreeze")
    if case.model.frozen != "none":
        first = 0
    if first is None:
        return not_applicable("nothing is frozen and nothing is unfrozen")
    observation = run(case)
    if not observation.numerics.replayable:
        return not_applicable(NOT_REPLAYABLE)
    verdicts = [exactly(left_mismatches(case, observation, ("freeze", "unfreeze")))]
    behind = range(first, len(case.program))
    shown = observed_gradients(Evaluator(case), observation, only=behind)
    verdicts += [judge(one) for one in shown]
    verdicts.append(_judge_steps(case, observation))
    return combine(*verdicts)


def unused_stay(case: Case, run: Run) -> Verdict:
    """A trainable parameter that no sequence of a batch uses has no gradient, so nothing moves it.

    No decay, no moments, no step counter: AdamW leaves every bit of it, and of what state it has.
    """
    if case.model.optional == "none":
        return not_applicable("every parameter is used by every sequence")
    observation, evaluator = run(case), Evaluator(case)
    mismatches: list[Mismatch] = []
    judged = False
    for step in steps(evaluator, observation):
        moment = step.moment
        mismatches += moment.mismatches
        if step.train is None or moment.after is None:
            continue
        unused = _unused(case, evaluator, step.train.batch) - moment.before.frozen
        judged = judged or bool(unused)
        mismatches += _present(moment, unused)
        mismatches += still_mismatches(f"{moment} unused", moment.before, moment.after, unused)
    if not judged:
        return not_applicable("every step uses every parameter")
    return exactly(mismatches)


def restore_takes_effect(case: Case, run: Run) -> Verdict:
    """Behind a restore everything starts from the first parameters again.

    They are there bit for bit on every rank, with the optimizer state as it was. The next training
    action has their gradients and the next inference their losses.
    """
    if _first(case, "restore") is None:
        return not_applicable("the program restores nothing")
    observation = run(case)
    if not observation.numerics.replayable:
        return not_applicable(NOT_REPLAYABLE)
    evaluator = Evaluator(case)
    mismatches = left_mismatches(case, observation, ("restore",))
    for own in observation.ranks:
        for index, record in enumerate(own.records):
            if isinstance(case.program[index], Restore) and isinstance(record, StateRecord):
                where = f"action {index} (restore) rank {own.rank} parameter"
                mismatches += part_mismatches(where, record.parameters, own.initial)
    verdicts = [exactly(mismatches)]
    next_trains, next_infers = _behind_restores(case)
    shown = observed_gradients(evaluator, observation, only=next_trains)
    verdicts += [judge(one) for one in shown]
    for moment in moments(evaluator, observation):
        if moment.index in next_infers:
            assert isinstance(moment.action, Infer)
            batch = moment.action.batch
            verdicts.append(judge_inference(evaluator, observation.numerics, moment, batch))
    return combine(*verdicts)


def _first(case: Case, *kinds: str) -> int | None:
    return next((at for at, action in enumerate(case.program) if action.kind in kinds), None)


def _judge_steps(case: Case, observation: Observation) -> Verdict:
    trajectory = Trajectory(case.optimizer, observation.numerics.storage)
    findings = Findings()
    for step in steps(Evaluator(case), observation):
        moment = step.moment
        findings.mismatches += step.mismatches
        if moment.after is None:
            break
        moving = step.moving(moment.before.weights.keys() - moment.before.frozen)
        shown = trajectory.step(str(moment), moment.before, moment.after, moving)
        findings.include(shown.mismatches, shown.margin)
    return findings.verdict("rigorous")


def _unused(case: Case, evaluator: Evaluator, batch: int) -> frozenset[str]:
    """The optional parameters that no sequence of the batch, on any rank, uses."""
    gated = {sequence.gated for sequence in case.batches[batch].sequences}
    last = unit_names(case)[-1]
    unused = set()
    if gated == {False}:
        unused.add("extra")
    if gated == {True}:
        unused.add("other")
    whole = case.model.optional == "unit" and gated == {False}
    return frozenset(
        name
        for name in evaluator.shapes
        if unit_of(case, name) == last and (whole or name.rpartition(".")[2] in unused)
    )


def _present(moment: Moment, names: frozenset[str]) -> list[Mismatch]:
    return [
        Mismatch(
            where=f"{moment} rank {rank} gradient {part.name}",
            got="present",
            wanted="absent: no sequence uses the parameter",
        )
        for rank, record in enumerate(moment.train_records)
        for part in (*record.gradients, *record.clipped)
        if part.name in names and part.data is not None
    ]


def _behind_restores(case: Case) -> tuple[frozenset[int], frozenset[int]]:
    """The first training action behind every restore, and the inference in between."""
    trains, infers = set(), set()
    waiting = False
    for index, action in enumerate(case.program):
        if isinstance(action, Restore):
            waiting = True
        elif waiting and isinstance(action, Infer):
            infers.add(index)
        elif waiting and action.kind == "train":
            trains.add(index)
            waiting = False
    return frozenset(trains), frozenset(infers)

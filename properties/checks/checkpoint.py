"""Checkpoints: saved without a trace, gone on from as if never left, whole or refused."""

from __future__ import annotations

from fsdp_engine.contract.actions import Load, Save
from fsdp_engine.contract.case import Case
from fsdp_engine.contract.observation import Observation, StateRecord, TrainRecord
from fsdp_engine.contract.protocol import Run
from oracles.assembly import replica_mismatches
from oracles.evaluation import Evaluator
from oracles.findings import Findings
from oracles.learning_rate import rate_mismatches
from oracles.metamorphic import first_difference, left_mismatches, without
from oracles.moments import Snapshot, moments
from oracles.resumption import (
    loaded_mismatches,
    loss_mismatches,
    snapshot_mismatches,
    uninterrupted,
)
from oracles.stepping import steps
from oracles.trajectory import Trajectory
from oracles.verdict import Mismatch, Verdict, exactly, not_applicable


def resume_equals_uninterrupted(case: Case, run: Run) -> Verdict:
    """Behind a resume everything is as at its save, and goes on as if nothing had been in between.

    Bit for bit on every rank: parameters, optimizer state and torch's random state at the resume;
    losses, gradients, norms, steps and learning rates of all that follows. Into the trainee that
    has moved on, or a new one; on the mesh of before.
    """
    resumes = _resumes(case)
    if not resumes or any(action.strategy or action.shape for _, action in resumes):
        return not_applicable("the program does not resume on the mesh of its checkpoint")
    observation = run(case)
    mismatches = loaded_mismatches(case, observation)
    shorter = uninterrupted(case)
    if shorter is not None:
        told = "resumed against uninterrupted"
        mismatches += first_difference(shorter, observation, run(shorter.case), told=told)
    return exactly(mismatches)


def resharded_goes_on(case: Case, run: Run) -> Verdict:
    """On another mesh or by the other strategy the full tensors are those that were saved.

    Every bit of parameters and optimizer state. From there each step is the optimizer's formula,
    the same on all replicas, at the schedule's rate. Where nothing is cast, the loss of the next
    batch on every rank is that of the run without a resume, bit for bit: it hangs on weights alone.
    """
    resumes = _resumes(case)
    if not any(action.strategy or action.shape for _, action in resumes):
        return not_applicable("the program resumes on no other mesh and by no other strategy")
    observation, evaluator = run(case), Evaluator(case)
    findings = Findings()
    findings.mismatches += _full_mismatches(evaluator, observation)
    if not findings.mismatches:
        _judge_steps(findings, evaluator, observation)
        _judge_rates(findings, evaluator, observation)
    shorter = None if findings.mismatches or case.dtypes.mixed else uninterrupted(case)
    if shorter is not None:
        (at, _), *_ = resumes
        findings.mismatches += loss_mismatches(shorter, observation, run(shorter.case), at)
    return findings.verdict("rigorous")


def save_changes_nothing(case: Case, run: Run) -> Verdict:
    """A save leaves the trainee as it was, and the rest of the program as it is without saves."""
    if not any(isinstance(action, Save) for action in case.program):
        return not_applicable("the program saves nothing")
    if _resumes(case):
        return not_applicable("a program that resumes is none without its saves")
    return _leaves_no_trace(case, run, run(case), ("save", "reject"))


def damaged_is_refused(case: Case, run: Run) -> Verdict:
    """A damaged checkpoint is refused with a `CheckpointError` on every rank, and nothing moves."""
    kinds = [action.kind for action in case.program]
    if "reject" not in kinds or "load" in kinds:
        return not_applicable("no damaged checkpoint is to be loaded, or a whole one is as well")
    observation = run(case)
    mismatches = [
        Mismatch(
            where=f"action {index} (reject) rank {own.rank} exception",
            got=record.raised or "none",
            wanted="CheckpointError",
        )
        for own in observation.ranks
        for index, record in enumerate(own.records)
        if isinstance(record, StateRecord)
        and kinds[index] == "reject"
        and record.raised != "CheckpointError"
    ]
    if mismatches:
        return exactly(mismatches)
    return _leaves_no_trace(case, run, observation, ("reject",))


def _resumes(case: Case) -> list[tuple[int, Load]]:
    return [(index, a) for index, a in enumerate(case.program) if isinstance(a, Load)]


def _leaves_no_trace(
    case: Case, run: Run, observation: Observation, kinds: tuple[str, ...]
) -> Verdict:
    mismatches = left_mismatches(case, observation, kinds)
    shorter = without(case, kinds)
    if shorter is not None:
        told = f"with {' and '.join(kinds)} against none"
        mismatches += first_difference(shorter, observation, run(shorter.case), told=told)
    return exactly(mismatches)


def _full_mismatches(evaluator: Evaluator, observation: Observation) -> list[Mismatch]:
    """Every resume against its save, as far as the program can be followed."""
    found: list[Mismatch] = []
    saved: Snapshot | None = None
    for moment in moments(evaluator, observation):
        if moment.after is None:
            return [*found, *moment.mismatches]
        if isinstance(moment.action, Save):
            saved = moment.after
        if isinstance(moment.action, Load):
            assert saved is not None
            found += snapshot_mismatches(moment, saved)
    return found


def _judge_steps(findings: Findings, evaluator: Evaluator, observation: Observation) -> None:
    case = evaluator.case
    trajectory = Trajectory(case.optimizer, observation.numerics.storage)
    for step in steps(evaluator, observation):
        moment = step.moment
        where = f"{moment} clipped gradient"
        findings.mismatches += [*step.mismatches, *replica_mismatches(step.clipped, where=where)]
        if moment.after is None:
            return
        trainable = frozenset(evaluator.shapes) - moment.before.frozen
        moving = step.moving(trainable)
        shown = trajectory.step(str(moment), moment.before, moment.after, moving)
        findings.include(shown.mismatches, shown.margin)


def _judge_rates(findings: Findings, evaluator: Evaluator, observation: Observation) -> None:
    for moment in moments(evaluator, observation):
        records = [record for record in moment.records if isinstance(record, TrainRecord)]
        if moment.after is None or not any(record.norm is not None for record in records):
            continue
        where = f"{moment} learning rate of the next step"
        rates, number = [record.lr for record in records], moment.after.schedule_steps
        findings.include(*rate_mismatches(where, rates, evaluator.case.optimizer, number))

"""The optimizer step: norm and clipping, the update, the schedule, and steps not taken."""

from __future__ import annotations

from dataclasses import replace

from fsdp_engine.contract.actions import Poison
from fsdp_engine.contract.case import Case
from fsdp_engine.contract.observation import (
    InferRecord,
    Observation,
    Record,
    TrainRecord,
)
from fsdp_engine.contract.protocol import Run
from oracles.assembly import replica_mismatches
from oracles.bitwise import array_mismatches, part_mismatches
from oracles.clipping import clip_factor, clipped
from oracles.evaluation import Evaluator
from oracles.gradients import Findings
from oracles.learning_rate import learning_rate, rate_mismatches
from oracles.moments import Moment
from oracles.norm import allowance_of, exact_norm, norm_mismatches
from oracles.stepping import (
    Step,
    finite,
    must_show,
    replayed,
    replayed_norm,
    steps,
    used_names,
)
from oracles.trajectory import Trajectory, compare_bounded, still_mismatches
from oracles.verdict import Mismatch, Verdict, exactly, not_applicable

_NO_STEP = "no action asks for a step"


def norm_and_clip(case: Case, run: Run) -> Verdict:
    """The norm of the whole gradient before clipping, and every gradient scaled by it.

    The norm is that of the trainable parameters' gradients, the same bits on all ranks, and within
    the bound of its declared dtype of the norm of the gradients that the engine itself shows. At
    the first step so it is of the norm of the replayed mean gradient, with the reduction's bound
    added. Clipped gradients are the gradients times min(1, clip / (norm + 1e-6)).
    """
    observation, evaluator = run(case), Evaluator(case)
    findings = Findings()
    judged = False
    for step in steps(evaluator, observation):
        if not judged:
            _judge_replayed_norm(findings, evaluator, observation, step)
        judged = True
        findings.mismatches += [
            *step.gradients.mismatches,
            *step.clipped.mismatches,
            *_agreement(step),
            *_frozen_gradients(step),
        ]
        _judge_norm(findings, case, observation, step)
        if finite(step.norms[0]):
            _judge_clip(findings, case, observation, step)
    return findings.verdict("rigorous") if judged else not_applicable(_NO_STEP)


def optimizer_step(case: Case, run: Run) -> Verdict:
    """Each step is the optimizer's formula, from the engine's own state and clipped gradient.

    Parameters that are frozen, or that no sequence of the batch uses, keep every bit of their
    values and of their optimizer state. So do all where the step is not taken.
    """
    observation, evaluator = run(case), Evaluator(case)
    trajectory = Trajectory(case.optimizer, observation.numerics.storage)
    findings = Findings()
    judged = False
    for step in steps(evaluator, observation):
        judged = True
        moment = step.moment
        findings.mismatches += [*step.clipped.mismatches, *moment.mismatches]
        if moment.after is None:
            break
        gradients = {}
        if step.taken:
            moving = _moving(evaluator, observation, step)
            gradients = {
                name: tensor
                for name, tensor in step.clipped.full.items()
                if tensor is not None and name in moving
            }
        shown = trajectory.step(str(moment), moment.before, moment.after, gradients)
        findings.mismatches += shown.mismatches
        findings.margin = max(findings.margin, shown.margin)
    return findings.verdict("rigorous") if judged else not_applicable(_NO_STEP)


def learning_rates(case: Case, run: Run) -> Verdict:
    """After every step, taken or not, the rate is the schedule's for the next one."""
    observation, evaluator = run(case), Evaluator(case)
    findings = Findings()
    judged = False
    for step in steps(evaluator, observation):
        judged = True
        _judge_rate(findings, case, step.moment)
    return findings.verdict("rigorous") if judged else not_applicable(_NO_STEP)


def non_finite_changes_nothing(case: Case, run: Run) -> Verdict:
    """A non-finite loss on one rank stops the step on all, and is forgotten.

    The norm is non-finite and no rank steps; no gradient is left; parameters and optimizer state
    are bit for bit what they were; the schedule goes on. What follows is bit for bit what the
    program without the poisoned actions gives, as long as the learning rates are the same.
    """
    if not any(isinstance(action, Poison) for action in case.program):
        return not_applicable("no action has a non-finite loss")
    observation, evaluator = run(case), Evaluator(case)
    findings = Findings()
    poisoned: list[int] = []
    for step in steps(evaluator, observation):
        moment = step.moment
        if not isinstance(moment.action, Poison):
            continue
        if step.taken and not must_show(evaluator, moment):
            if findings.mismatches:
                break
            return not_applicable("a poisoned sequence has no part in the gradient")
        poisoned.append(moment.index)
        _judge_not_taken(findings, case, step)
    rest = [action for action in case.program if not isinstance(action, Poison)]
    if rest and not findings.mismatches:
        clean = run(replace(case, program=tuple(rest)))
        findings.mismatches += _differences(case, observation, clean, poisoned)
    return exactly(findings.mismatches)


def _agreement(step: Step) -> list[Mismatch]:
    """What ranks and replicas must agree on, bit for bit."""
    first = step.norms[0]
    found = [
        Mismatch(
            where=f"{step} norm, rank {rank}", got=repr(norm), wanted=f"{first!r} as on rank 0"
        )
        for rank, norm in enumerate(step.norms)
        if repr(norm) != repr(first)
    ]
    found += [
        Mismatch(
            where=f"{step} rank {rank}",
            got=f"stepped={record.stepped} at norm {record.norm!r}",
            wanted="a step where the norm is finite and only there",
        )
        for rank, record in enumerate(step.records)
        if record.stepped != finite(record.norm)
    ]
    where = f"{step} clipped gradient"
    return [*found, *replica_mismatches(step.clipped, where=where)]


def _frozen_gradients(step: Step) -> list[Mismatch]:
    return [
        Mismatch(where=f"{step} gradient {name}", got="present", wanted="absent: it is frozen")
        for name, tensor in step.gradients.full.items()
        if tensor is not None and name in step.moment.before.frozen
    ]


def _judge_norm(findings: Findings, case: Case, observation: Observation, step: Step) -> None:
    bound = allowance_of(
        [record.gradients for record in step.records],
        shards=case.mesh.shards,
        norm=observation.numerics.norm,
    )
    exact = exact_norm(step.present())
    where = f"{step} norm"
    found, margin = norm_mismatches(where, _number(step.norms[0]), exact, bound)
    findings.mismatches += found
    findings.margin = max(findings.margin, margin)


def _judge_replayed_norm(
    findings: Findings, evaluator: Evaluator, observation: Observation, step: Step
) -> None:
    local = replayed(evaluator, observation, step)
    if local is None:
        return
    numerics = observation.numerics
    norm, off_by = replayed_norm(evaluator, numerics, step, local)
    bound = allowance_of(
        [record.gradients for record in step.records],
        shards=evaluator.case.mesh.shards,
        norm=numerics.norm,
    )
    where = f"{step} norm, against the mean of the ranks' own gradients"
    found, margin = norm_mismatches(where, _number(step.norms[0]), norm, bound, off_by=off_by)
    findings.mismatches += found
    findings.margin = max(findings.margin, margin)


def _judge_clip(findings: Findings, case: Case, observation: Observation, step: Step) -> None:
    numerics = observation.numerics
    factor = clip_factor(_number(step.norms[0]), case.optimizer.clip_grad, numerics.norm)
    for name, gradient in step.present().items():
        where = f"{step} clipped gradient {name}"
        got = step.clipped.full.get(name)
        if got is None:
            findings.mismatches.append(Mismatch(where=where, got="absent", wanted="present"))
        else:
            wanted = clipped(gradient, factor, numerics.shard_accumulate)
            compare_bounded(findings, where, got, wanted)
    findings.mismatches += [
        Mismatch(where=f"{step} clipped gradient {name}", got="present", wanted="absent as before")
        for name, tensor in step.clipped.full.items()
        if tensor is not None and step.gradients.full.get(name) is None
    ]


def _moving(evaluator: Evaluator, observation: Observation, step: Step) -> frozenset[str]:
    """The parameters that a step may move: trainable, and used where some may not be."""
    trainable = frozenset(evaluator.shapes) - step.moment.before.frozen
    if evaluator.case.model.optional == "none":
        return trainable
    local = replayed(evaluator, observation, step)
    return trainable if local is None else trainable & used_names(local)


def _judge_rate(findings: Findings, case: Case, moment: Moment) -> None:
    rates = [record.lr for record in moment.train_records]
    steps_after = moment.before.schedule_steps + 1
    where = f"{moment} learning rate of the next step"
    found, margin = rate_mismatches(where, rates, case.optimizer, steps_after)
    findings.mismatches += found
    findings.margin = max(findings.margin, margin)


def _judge_not_taken(findings: Findings, case: Case, step: Step) -> None:
    moment = step.moment
    for rank, record in enumerate(step.records):
        where = f"{moment}, rank {rank}"
        if finite(record.norm):
            wanted = "nan or infinite: a loss is"
            findings.mismatches.append(
                Mismatch(where=f"{where} norm", got=repr(record.norm), wanted=wanted)
            )
        if record.stepped:
            wanted = "no step on any rank"
            findings.mismatches.append(Mismatch(where=where, got="a step", wanted=wanted))
        findings.mismatches += [
            Mismatch(where=f"{where} gradient {part.name}", got="left", wanted="cleared")
            for part in record.clipped
            if part.data is not None
        ]
    findings.mismatches += moment.mismatches
    if moment.after is not None:
        names = moment.before.weights.keys()
        findings.mismatches += still_mismatches(str(moment), moment.before, moment.after, names)
    _judge_rate(findings, case, moment)


def _differences(
    case: Case, observation: Observation, clean: Observation, poisoned: list[int]
) -> list[Mismatch]:
    """The first action that differs from the program without the poisoned ones.

    A step that was not taken moved the schedule on. From the first step with another rate only the
    gradients and the norm before it are the same.
    """
    kept = [index for index in range(len(case.program)) if index not in poisoned]
    num_steps = 0
    for place, index in enumerate(kept):
        records = [
            (rank.records[index], other.records[place])
            for rank, other in zip(observation.ranks, clean.ranks, strict=True)
        ]
        action = case.program[index]
        skipped = sum(before < index for before in poisoned)
        steps_here = isinstance(records[0][1], TrainRecord) and records[0][1].norm is not None
        same_rate = not steps_here or _same_rate(case, num_steps, num_steps + skipped)
        found = [
            mismatch
            for rank, (got, wanted) in enumerate(records)
            for mismatch in _record_mismatches(
                f"action {index} ({action.kind}) after a poisoned one, rank {rank}",
                got,
                wanted,
                whole=same_rate,
            )
        ]
        if found or not same_rate:
            return found
        num_steps += steps_here
    return []


def _same_rate(case: Case, one: int, other: int) -> bool:
    rates = [learning_rate(case.optimizer, steps_before) for steps_before in (one, other)]
    return bool(rates[0].value == rates[1].value)


def _record_mismatches(where: str, got: Record, wanted: Record, *, whole: bool) -> list[Mismatch]:
    if isinstance(got, InferRecord) and isinstance(wanted, InferRecord):
        return array_mismatches(f"{where} token losses", got.token_losses, wanted.token_losses)
    if not (isinstance(got, TrainRecord) and isinstance(wanted, TrainRecord)):
        return []
    found = part_mismatches(f"{where} gradient", got.gradients, wanted.gradients)
    if repr(got.norm) != repr(wanted.norm):
        wanted_norm = f"{wanted.norm!r} as without it"
        found.append(Mismatch(where=f"{where} norm", got=repr(got.norm), wanted=wanted_norm))
    if not whole:
        return found
    found += part_mismatches(f"{where} parameter", got.parameters, wanted.parameters)
    for slot in sorted({*got.optimizer_state, *wanted.optimizer_state}):
        parts = [record.optimizer_state.get(slot, ()) for record in (got, wanted)]
        found += part_mismatches(f"{where} {slot}", *parts)
    return found


def _number(norm: float | None) -> float:
    assert norm is not None
    return norm

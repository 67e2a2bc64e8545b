"""The optimizer step: norm and clipping, the update, the schedule."""

from __future__ import annotations

from fsdp_engine.contract.case import Case
from fsdp_engine.contract.observation import (
    Observation,
    TrainRecord,
)
from fsdp_engine.contract.protocol import Run
from oracles.assembly import replica_mismatches
from oracles.clipping import clip_factor, clipped
from oracles.evaluation import Evaluator
from oracles.findings import Findings
from oracles.learning_rate import rate_mismatches
from oracles.norm import NormAllowance, allowance_of, exact_norm, norm_mismatches
from oracles.stepping import (
    Step,
    finite,
    replayed,
    replayed_norm,
    steps,
    used_names,
)
from oracles.trajectory import Trajectory, compare_bounded
from oracles.verdict import Mismatch, Verdict, not_applicable

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
        bound = allowance_of(
            [record.gradients for record in step.records],
            shards=case.mesh.shards,
            norm=observation.numerics.norm,
        )
        if not judged:
            _judge_replayed_norm(findings, evaluator, observation, step, bound)
        judged = True
        findings.mismatches += [
            *step.gradients.mismatches,
            *step.clipped.mismatches,
            *_agreement(step),
            *_frozen_gradients(step),
        ]
        exact = exact_norm(step.present())
        findings.include(*norm_mismatches(f"{step} norm", _number(step.norms[0]), exact, bound))
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
        moving = step.moving(_movable(evaluator, observation, step)) if step.taken else {}
        shown = trajectory.step(str(moment), moment.before, moment.after, moving)
        findings.include(shown.mismatches, shown.margin)
    return findings.verdict("rigorous") if judged else not_applicable(_NO_STEP)


def learning_rates(case: Case, run: Run) -> Verdict:
    """After every step, taken or not, the rate is the schedule's for the next one."""
    observation = run(case)
    findings = Findings()
    num_steps = 0
    for index, action in enumerate(case.program):
        records = [rank.records[index] for rank in observation.ranks]
        shown = [record for record in records if isinstance(record, TrainRecord)]
        if any(record.norm is not None for record in shown):
            num_steps += 1
            where = f"action {index} ({action.kind}) learning rate of the next step"
            rates = [record.lr for record in shown]
            findings.include(*rate_mismatches(where, rates, case.optimizer, num_steps))
    return findings.verdict("rigorous") if num_steps else not_applicable(_NO_STEP)


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


def _judge_replayed_norm(
    findings: Findings,
    evaluator: Evaluator,
    observation: Observation,
    step: Step,
    bound: NormAllowance,
) -> None:
    local = replayed(evaluator, observation, step)
    if local is None:
        return
    norm, off_by = replayed_norm(evaluator, observation.numerics, step, local)
    where = f"{step} norm, against the mean of the ranks' own gradients"
    found = norm_mismatches(where, _number(step.norms[0]), norm, bound, off_by=off_by)
    findings.include(*found, widened=bool(local.spread))


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


def _movable(evaluator: Evaluator, observation: Observation, step: Step) -> frozenset[str]:
    """The parameters that a step may move: trainable, and used where some may not be."""
    trainable = frozenset(evaluator.shapes) - step.moment.before.frozen
    if evaluator.case.model.optional == "none":
        return trainable
    local = replayed(evaluator, observation, step)
    return trainable if local is None else trainable & used_names(local)


def _number(norm: float | None) -> float:
    assert norm is not None
    return norm

"""The gradients of every training action, before clipping."""

from __future__ import annotations

from fsdp_engine.contract.case import Case
from fsdp_engine.contract.protocol import Run
from oracles.assembly import replica_mismatches
from oracles.evaluation import Evaluator
from oracles.gradients import (
    agreement_mismatches,
    judge,
    observed_gradients,
    start_mismatches,
)
from oracles.verdict import NOT_REPLAYABLE, Verdict, combine, exactly, not_applicable


def match_oracle(case: Case, run: Run) -> Verdict:
    """The engine computes the gradient of the global batch, whatever the mesh and the plan.

    The engine's plan is checked to be a partition first. Then its gradients are held against the
    replayed local ones by the rounding bound, the replay in double against the truth, certified
    elements against the truth bit for bit, and the replicas against each other.
    """
    observation = run(case)
    if not observation.numerics.replayable:
        return not_applicable(NOT_REPLAYABLE)
    evaluator = Evaluator(case)
    verdicts = [exactly(start_mismatches(evaluator, observation))]
    for shown in observed_gradients(evaluator, observation):
        where = f"{shown.action} gradient"
        verdicts.append(exactly(replica_mismatches(shown.assembled, where=where)))
        verdicts.append(judge(shown))
    if len(verdicts) == 1 and not verdicts[0].mismatches:
        return not_applicable("no training action")
    return combine(*verdicts)


def replicas_agree(case: Case, run: Run) -> Verdict:
    """Along the replicate axis gradients, and parameters after a step, are bit-equal."""
    if case.mesh.replicas == 1:
        return not_applicable(f"mesh {case.mesh.shape} has one replica")
    observation = run(case)
    evaluator = Evaluator(case)
    return exactly(agreement_mismatches(evaluator, observation))

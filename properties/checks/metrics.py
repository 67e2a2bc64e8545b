"""What the engine reports of a batch."""

from __future__ import annotations

from fsdp_engine.contract.case import Case
from fsdp_engine.contract.protocol import Run
from oracles.evaluation import Evaluator
from oracles.findings import Findings
from oracles.metrics import judge_loss, metric_mismatches, reports_anything
from oracles.moments import moments
from oracles.plans import plan_mismatches
from oracles.records import train_actions
from oracles.verdict import Verdict, not_applicable


def match_oracle(case: Case, run: Run) -> Verdict:
    """Loss, loss tokens and sequences are the global batch's, the same bits on every rank.

    Counts are exact. The loss is within the rounding of any sum of the replayed per-token losses,
    whose meaning is the truth's. Not applicable to an engine that reports none of the three.
    """
    observation, evaluator = run(case), Evaluator(case)
    actions = {action.index: action for action in train_actions(case, observation)}
    findings = Findings()
    judged = False
    for moment in moments(evaluator, observation):
        findings.mismatches += moment.mismatches
        action = actions.get(moment.index)
        if action is None or not any(reports_anything(one.metrics) for one in action.records):
            continue
        judged = True
        findings.mismatches += metric_mismatches(action, case.batches[action.batch])
        findings.mismatches += plan_mismatches(case, action)
        if findings.mismatches or not observation.numerics.replayable:
            continue
        loss = judge_loss(evaluator, observation.numerics, action, moment.before.weights)
        findings.include(loss.mismatches, loss.margin, widened=loss.widened)
    if not judged:
        return not_applicable("the engine reports no loss and no counts")
    return findings.verdict("rigorous")

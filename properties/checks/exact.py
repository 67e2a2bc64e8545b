"""Dyadic cases: where no sum rounds, nothing is allowed."""

from __future__ import annotations

from fsdp_engine.contract.case import Case
from fsdp_engine.contract.protocol import Run
from oracles.evaluation import Evaluator
from oracles.gradients import judge_exact, observed_gradients
from oracles.verdict import NOT_REPLAYABLE, Verdict, combine, exactly, not_applicable


def match_truth_bitwise(case: Case, run: Run) -> Verdict:
    """Every certified element of every gradient equals the truth bit for bit.

    Not applicable where nothing but zeros could be certified.
    """
    if not case.exact:
        return not_applicable("the case does not ask for dyadic values")
    observation = run(case)
    if not observation.numerics.replayable:
        return not_applicable(NOT_REPLAYABLE)
    verdicts = []
    certified = False
    for shown in observed_gradients(Evaluator(case), observation):
        verdicts.append(exactly(list(shown.mismatches)))
        if shown.prediction is not None:
            verdicts.append(judge_exact(shown, shown.prediction))
            certified = certified or shown.prediction.certifies_anything
    failed = any(verdict.mismatches for verdict in verdicts)
    if not certified and not failed:
        return not_applicable("no gradient element is exact in every order of evaluation")
    return combine(*verdicts)

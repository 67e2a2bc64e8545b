"""Inference: it returns what the current weights give, and training does not notice it."""

from __future__ import annotations

from fsdp_engine.contract.actions import Infer
from fsdp_engine.contract.case import Case
from fsdp_engine.contract.protocol import Run
from oracles.evaluation import Evaluator
from oracles.inference import judge_inference
from oracles.metamorphic import first_difference, left_mismatches, without
from oracles.moments import moments
from oracles.verdict import NOT_REPLAYABLE, Verdict, combine, exactly, not_applicable

_LOOKING = ("infer", "eval", "export", "resume")


def changes_nothing(case: Case, run: Run) -> Verdict:
    """Infer, eval and export between training actions change none of them by a bit.

    After eval and export the parameters, the optimizer state, the mode and `requires_grad` are as
    before. Everything else, losses and metrics included, is that of the program without them.
    """
    if not any(action.kind in _LOOKING for action in case.program):
        return not_applicable("the program has nothing but training actions")
    observation = run(case)
    mismatches = left_mismatches(case, observation, _LOOKING)
    shorter = without(case, _LOOKING)
    if shorter is not None:
        told = "with inference against none"
        mismatches += first_difference(shorter, observation, run(shorter.case), told=told)
    return exactly(mismatches)


def matches_oracle(case: Case, run: Run) -> Verdict:
    """Per-token losses are those of the engine's weights at that moment.

    Bit for bit those of one forward over the rank's batch in eval mode, under the declared
    numerics; and a sequence's losses are its own, as the truth has them.
    """
    if not any(isinstance(action, Infer) for action in case.program):
        return not_applicable("the program infers nothing")
    observation = run(case)
    if not observation.numerics.replayable:
        return not_applicable(NOT_REPLAYABLE)
    evaluator = Evaluator(case)
    verdicts: list[Verdict] = []
    for moment in moments(evaluator, observation):
        if isinstance(moment.action, Infer) and moment.action.adapter == "on":
            batch = moment.action.batch
            verdicts.append(judge_inference(evaluator, observation.numerics, moment, batch))
        verdicts.append(exactly(list(moment.mismatches)))
    return combine(*verdicts)

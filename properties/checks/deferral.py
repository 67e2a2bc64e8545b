"""Deferred gradient sync changes when gradients are reduced, not what they are."""

from __future__ import annotations

from dataclasses import replace

from fsdp_engine.contract.case import Case, ConfigSource
from fsdp_engine.contract.errors import UnsupportedCase
from fsdp_engine.contract.observation import Observation
from fsdp_engine.contract.protocol import Run
from oracles.communication import predict_levels, predict_reductions
from oracles.compare import compare_exact, compare_within
from oracles.evaluation import Evaluator
from oracles.findings import Findings
from oracles.gradients import ActionGradients, judge, observed_gradients
from oracles.records import TrainAction, gates, train_actions
from oracles.verdict import NOT_REPLAYABLE, Mismatch, Verdict, combine, exactly, not_applicable


def deferred_equals_eager(case: Case, run: Run) -> Verdict:
    """Both sync modes satisfy the oracle and agree with each other.

    Each run is judged under the numerics declared for it. Against each other: bit-equal where
    certified exact, else within the sum of both bounds and of what local accumulation may round,
    for every action up to the first step (from there on their weights differ). Deferred sync
    reduces each unit once, eager sync once per micro-batch. A configuration object without the
    field that switches deferral behaves as one that defers.
    """
    source: ConfigSource = "yaml" if case.engine.config_source == "yaml" else "dataclass"
    eager = run(_with_sync(case, deferred=False, source=source))
    deferred_case = _with_sync(case, deferred=True, source=source)
    deferred = run(deferred_case)
    if not (eager.numerics.replayable and deferred.numerics.replayable):
        return not_applicable(NOT_REPLAYABLE)
    one = list(
        observed_gradients(Evaluator(_with_sync(case, deferred=False, source=source)), eager)
    )
    other = list(observed_gradients(Evaluator(deferred_case), deferred))
    if not one:
        return not_applicable("no training action")
    verdicts = [judge(shown) for shown in (*one, *other)]
    for shown_eager, shown_deferred in zip(one, other, strict=False):
        verdicts.append(_agreement(shown_eager, shown_deferred))
        if any(record.stepped for record in shown_eager.action.records):
            break
    verdicts += [_counts(case, observation) for observation in (eager, deferred)]
    verdicts.append(_legacy(case, run, deferred))
    return combine(*verdicts)


def _with_sync(case: Case, *, deferred: bool, source: ConfigSource) -> Case:
    return replace(case, engine=replace(case.engine, deferred=deferred, config_source=source))


def _agreement(eager: ActionGradients, deferred: ActionGradients) -> Verdict:
    """The two runs' gradients of one action, from the same weights.

    The engine's gradients differ from the exact means of the local ones by at most each bound, and
    those means from each other by what adding micro-batches up locally may round.
    """
    wanted, allowed_by = eager.prediction, deferred.prediction
    if wanted is None or allowed_by is None:
        return exactly([])  # named by the oracle already
    findings = Findings()
    plans = [[record.plan for record in shown.action.records] for shown in (eager, deferred)]
    if plans[0] != plans[1]:
        where = f"{deferred.action} plan, deferred"
        difference = Mismatch(where=where, got=str(plans[1]), wanted=f"{plans[0]} as in eager mode")
        return exactly([difference])
    for name in wanted.shapes:
        where = f"{eager.action} deferred against eager, gradient {name}"
        allowed = wanted.allowed(name) + allowed_by.allowed(name)
        if allowed_by.numerics.deferred:
            allowed = allowed + wanted.accumulation_allowed(name)
        findings.add(
            compare_within(deferred.got(name), eager.got(name), allowed, where=where),
            spread=wanted.spread(name) + allowed_by.spread(name),
        )
        exact = wanted.exact[name] & allowed_by.exact[name]
        findings.add(compare_exact(deferred.got(name), eager.got(name), exact, where=where))
    return findings.verdict("exact" if wanted.certified and allowed_by.certified else "rigorous")


def _counts(case: Case, observation: Observation) -> Verdict:
    """How many gradient reductions each level of a train action takes, on every rank."""
    found: list[Mismatch] = []
    for action in train_actions(case, observation):
        if len({len(record.plan) for record in action.records}) > 1:
            continue  # named by the oracle already
        deferred = observation.numerics.deferred and not action.fell_back
        units = predict_reductions(
            case, observation.numerics, gates(case, action), deferred=deferred
        )
        least, most = sum(unit.least for unit in units), sum(unit.most for unit in units)
        found += _outside(case, action, least, most, mode="deferred" if deferred else "eager")
    return exactly(found)


def _outside(
    case: Case, action: TrainAction, least: int, most: int, *, mode: str
) -> list[Mismatch]:
    found = []
    for rank, record in enumerate(action.records):
        for level in predict_levels(case):
            count = sum(
                collective.phase == "backward"
                and collective.micro_batch >= action.first_forward(rank)
                and collective.operation == level.operation
                and collective.axis == level.axis
                for collective in record.collectives
            )
            if not least <= count <= most:
                where = f"{action} {mode} sync, rank {rank}: {level.operation} over {level.axis}"
                wanted = str(most) if least == most else f"{least} to {most}"
                found.append(Mismatch(where=where, got=str(count), wanted=wanted))
    return found


def _legacy(case: Case, run: Run, deferred: Observation) -> Verdict:
    """The object without the field: the same gradients bit for bit, by the same collectives."""
    legacy_case = _with_sync(case, deferred=True, source="legacy")
    try:
        legacy = run(legacy_case)
    except UnsupportedCase as refusal:
        return not_applicable(str(refusal))
    found = []
    for one, other in zip(
        train_actions(legacy_case, legacy), train_actions(legacy_case, deferred), strict=True
    ):
        for rank, (got, wanted) in enumerate(zip(one.records, other.records, strict=True)):
            where = f"{one} legacy configuration, rank {rank}"
            if got.gradients != wanted.gradients:
                names = [
                    part.name
                    for part, same in zip(got.gradients, wanted.gradients, strict=False)
                    if part != same
                ]
                found.append(
                    Mismatch(where=where, got=f"gradients {names}", wanted="those of deferred sync")
                )
            if got.collectives != wanted.collectives:
                found.append(
                    Mismatch(
                        where=where,
                        got=f"{len(got.collectives)} collectives",
                        wanted=f"the {len(wanted.collectives)} of deferred sync",
                    )
                )
    return exactly(found)

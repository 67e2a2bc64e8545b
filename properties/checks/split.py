"""The gradient is the batch's: it does not depend on how the sequences are partitioned."""

from __future__ import annotations

from dataclasses import replace

from fsdp_engine.contract.actions import Train
from fsdp_engine.contract.batch import Batch, Planning, Sequence, Static, TokenBudget
from fsdp_engine.contract.case import Case, Mesh
from fsdp_engine.contract.errors import UnsupportedCase
from fsdp_engine.contract.protocol import Run
from oracles.compare import compare_exact
from oracles.evaluation import Evaluator
from oracles.findings import Findings
from oracles.gradients import ActionGradients, judge, observed_gradients
from oracles.truth import Truth
from oracles.verdict import NOT_REPLAYABLE, Verdict, combine, exactly, not_applicable


def partition_invariance(case: Case, run: Run) -> Verdict:
    """The same sequences dealt out otherwise give the gradient of the same batch.

    Partitions: the case's own; all sequences in reverse over the same mesh, in as few micro-batches
    as the sequences allow; one rank with everything. Every run is held against the truth of the
    case's own batch, by its own bound: so any two agree within the sum of their bounds. Where both
    are certified exact they are compared bit for bit.
    """
    trained = sorted({action.batch for action in case.program if action.kind == "train"})
    if not trained:
        return not_applicable("no training action")
    own = replace(case, program=tuple(Train(batch=index) for index in trained))
    verdicts: list[Verdict] = []
    truths: dict[int, Truth] = {}
    first: list[ActionGradients] = []
    for partition in (own, *partitions(own)):
        try:
            observation = run(partition)
        except UnsupportedCase as refusal:
            if partition is own:
                raise
            verdicts.append(not_applicable(str(refusal)))
            continue
        if not observation.numerics.replayable:
            return not_applicable(NOT_REPLAYABLE)
        shown = list(observed_gradients(Evaluator(partition), observation, truths=truths))
        verdicts += [judge(one) for one in shown]
        if partition is own:
            first = shown
            truths = {
                one.action.batch: one.prediction.truth
                for one in shown
                if one.prediction is not None
            }
        verdicts += [_same(one, other) for one, other in zip(first, shown, strict=True)]
    return combine(*verdicts)


def partitions(case: Case) -> tuple[Case, ...]:
    """Other cases over the same sequences: reversed over the mesh, and on one rank."""
    alone = replace(
        case,
        mesh=Mesh(shape=(1,) * case.mesh.ndim),
        batches=tuple(Batch(ranks=(batch.sequences,)) for batch in case.batches),
        engine=replace(case.engine, planning=_one_at_a_time(case)),
    )
    per_rank = {len(rank) for batch in case.batches for rank in batch.ranks}
    whole: Planning = (
        Static(sequences=per_rank.pop())
        if len(per_rank) == 1
        else TokenBudget(max_tokens=sum(s.length for b in case.batches for s in b.sequences))
    )
    reverse = replace(
        case,
        batches=tuple(_reversed(batch) for batch in case.batches),
        engine=replace(case.engine, planning=whole),
    )
    return tuple(other for other in (reverse, alone) if other != case)


def _one_at_a_time(case: Case) -> Planning:
    """A plan of many micro-batches, of the same kind."""
    if isinstance(case.engine.planning, Static):
        return Static(sequences=1)
    longest = max(s.length for batch in case.batches for s in batch.sequences)
    return TokenBudget(max_tokens=longest)


def _reversed(batch: Batch) -> Batch:
    """The same number of sequences per rank, dealt out from the last one."""
    left = list(reversed(batch.sequences))
    ranks: list[tuple[Sequence, ...]] = []
    for rank in batch.ranks:
        ranks.append(tuple(left[: len(rank)]))
        del left[: len(rank)]
    return Batch(ranks=tuple(ranks))


def _same(first: ActionGradients, other: ActionGradients) -> Verdict:
    findings = Findings()
    if first.prediction is None or other.prediction is None:
        return exactly([])  # named by the oracle already
    for name in first.prediction.shapes:
        where = f"{other.action} repartitioned, gradient {name}"
        exact = first.prediction.exact[name] & other.prediction.exact[name]
        findings.add(compare_exact(other.got(name), first.got(name), exact, where=where))
    return findings.verdict("exact")

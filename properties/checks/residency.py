"""What a rank holds in full between forward, backward and the next micro-batch."""

from __future__ import annotations

from fsdp_engine.contract.case import Case
from fsdp_engine.contract.observation import Residency, TrainRecord
from fsdp_engine.contract.protocol import Run
from oracles.memory import Held, held_in_full, predict_held
from oracles.records import actions_as_built, uniform_gates
from oracles.verdict import Mismatch, Verdict, exactly, not_applicable


def matches_strategy(case: Case, run: Run) -> Verdict:
    """After a forward, ZeRO-3 holds no wrapped unit in full and ZeRO-2 holds every one.

    The root stays in full after forward: always under ZeRO-2; under ZeRO-3 for torch's wrappers,
    while other engines are free. After a backward that synchronised gradients nothing is held;
    after one that did not, ZeRO-3 holds no unit. With one shard parameters are always whole.
    """
    observation = run(case)
    mismatches: list[Mismatch] = []
    judged = False
    for action in actions_as_built(case, observation):
        deferred = case.engine.deferred and not action.fell_back
        gated = uniform_gates(case, action)
        for rank, record in enumerate(action.records):
            first = action.first_forward(rank)
            for held in record.residency:
                place = held.micro_batch - first
                if place < 0:  # of an attempt that was abandoned
                    continue
                judged = True
                if place >= len(record.plan):
                    mismatches.append(_one_too_many(f"{action} rank {rank}", record))
                    break
                bounds = held_in_full(
                    case,
                    observation.numerics,
                    held.moment,
                    syncing=not deferred or place == len(record.plan) - 1,
                    gated=None if gated is None else gated[place],
                )
                got = frozenset(held.unsharded)
                where = f"{action} rank {rank} {_moment(held)}"
                mismatches += _held_mismatches(where, got, *bounds)
    if not judged:
        return not_applicable("no residency was recorded")
    return exactly(mismatches)


def _one_too_many(where: str, record: TrainRecord) -> Mismatch:
    wanted = f"{len(record.plan)}, one for each micro-batch of the plan"
    return Mismatch(where=f"{where} forward passes", got="more", wanted=wanted)


def retained_bytes(case: Case, run: Run) -> Verdict:
    """Parameters in full and unsharded bytes at each moment, exactly, for torch's own wrappers.

    Not applicable to an action that fell back to eager sync, where ranks differ in whether a
    micro-batch uses the model's optional part, and where no residency was recorded.
    """
    observation = run(case)
    if not observation.numerics.semantics:
        return not_applicable("the engine declares no wrapper whose memory is predicted")
    mismatches: list[Mismatch] = []
    judged = False
    for action in actions_as_built(case, observation):
        gated = uniform_gates(case, action)
        if gated is None or action.fell_back:
            continue
        predicted = predict_held(case, observation.numerics, gated, deferred=case.engine.deferred)
        for rank, record in enumerate(action.records):
            if record.residency:
                judged = True
                where = f"{action} rank {rank}"
                mismatches += _sample_mismatches(where, record.residency, predicted)
    if not judged:
        return not_applicable("no training action whose residency was recorded and predicted")
    return exactly(mismatches)


def _sample_mismatches(
    where: str, got: tuple[Residency, ...], wanted: tuple[Held, ...]
) -> list[Mismatch]:
    moments = [(held.moment, held.micro_batch) for held in got]
    expected = [(held.moment, held.micro_batch) for held in wanted]
    if moments != expected:
        return [Mismatch(where=f"{where} samples", got=str(moments), wanted=str(expected))]
    mismatches = []
    for sample, held in zip(got, wanted, strict=True):
        place = f"{where} {_moment(sample)}"
        names = frozenset(sample.unsharded)
        mismatches += _held_mismatches(place, names, held.unsharded, held.unsharded)
        mismatches += _byte_mismatches(
            f"{place} unsharded gradients", sample.retained_gradient_bytes, held.gradient_bytes
        )
        mismatches += _byte_mismatches(
            f"{place} gathered parameters", sample.retained_parameter_bytes, held.parameter_bytes
        )
    return mismatches


def _held_mismatches(
    where: str, got: frozenset[str], least: frozenset[str], most: frozenset[str]
) -> list[Mismatch]:
    mismatches = [
        Mismatch(where=f"{where} {name}", got="sharded", wanted="resident in full")
        for name in sorted(least - got)
    ]
    mismatches += [
        Mismatch(where=f"{where} {name}", got="resident in full", wanted="sharded")
        for name in sorted(got - most)
    ]
    return mismatches


def _byte_mismatches(where: str, got: int, wanted: int) -> list[Mismatch]:
    if got == wanted:
        return []
    return [Mismatch(where=where, got=f"{got} bytes", wanted=f"{wanted} bytes")]


def _moment(held: Residency) -> str:
    return f"{held.moment.replace('_', ' ')} of micro-batch {held.micro_batch}"

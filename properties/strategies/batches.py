"""Global batches that no wrong reduction can confuse.

Ranks of a batch have different numbers of loss tokens, and so have the micro-batches of a rank, so
that a mean of means, a dropped rank and a wrong normaliser all show. Everything is built valid:
lists are drawn and then completed, nothing is filtered.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from fsdp_engine.contract.batch import Batch, Planning, Sequence, Static, TokenBudget
from fsdp_engine.contract.case import LossMode
from fsdp_engine.contract.limits import MAX_LENGTH
from fsdp_engine.contract.model import OptionalPart

Local: TypeAlias = list[Sequence]

# Sequences of the default length first; then the shortest; sequences without loss tokens are legal.
_LENGTHS = (2, 1, 3, 4, 5, 7)
_LOSS_TOKENS = (1, 2, 0, 3, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What all batches of a case share: how many micro-batches of which kind.

    `gated` says for each static micro-batch whether it uses the model's optional part. It is the
    same on all ranks, unless `gated_by_rank`: then every rank draws its own. A rank's sequences
    come in groups of `group`, and so do those of a micro-batch.
    """

    num_micro_batches: int
    per_micro_batch: int
    gated: tuple[bool, ...]
    gated_by_rank: bool
    token_budget: bool
    group: int = 1


@st.composite
def plans(
    draw: DrawFn,
    *,
    planning: str,
    optional: OptionalPart,
    group: int = 1,
    several: bool = False,
) -> Plan:
    """Plans of 1 to 4 micro-batches, the simplest first; with `several` the simplest has two."""
    counts = (2, 1, 3, 4) if several else (1, 2, 3, 4)
    num = draw(st.sampled_from(counts), label="micro-batches")
    gated = (True,) * num
    gated_by_rank = False
    if optional != "none":
        gated = draw(_gates(num), label="gated micro-batches")
    if optional in ("parameter", "either"):
        # A unit stays with all ranks: a wrapper gathers it on all of them or on none.
        gated_by_rank = draw(st.booleans(), label="gated by rank")
    return Plan(
        num_micro_batches=num,
        per_micro_batch=draw(st.sampled_from((1, 2)), label="groups per micro-batch") * group,
        gated=gated,
        gated_by_rank=gated_by_rank,
        token_budget=planning == "token_budget",
        group=group,
    )


def _gates(num: int) -> st.SearchStrategy[tuple[bool, ...]]:
    """Which micro-batches use the part: all, all but the last, the last alone, none, any."""
    not_last = (True,) * (num - 1) + (False,)
    only_last = (False,) * (num - 1) + (True,)
    named = [(True,) * num, not_last, only_last, (False,) * num]
    anyhow = st.tuples(*[st.booleans()] * num)
    return st.one_of(st.sampled_from(list(dict.fromkeys(named))), anyhow)


@st.composite
def batches(draw: DrawFn, *, world_size: int, plan: Plan) -> Batch:
    """One batch for every rank; see the module's first lines for what is guaranteed."""
    # Two ranks are drawn for one as well: shrinking prefers fewer draws to the usual world of two.
    ranks = [_local(draw, plan) for _ in range(max(world_size, 2))][:world_size]
    if not plan.token_budget:
        for local in ranks:
            _micro_batches_differ(local, plan)
    _ranks_differ(ranks, plan)
    return Batch(ranks=_with_keys(ranks))


def planning_for(all_batches: tuple[Batch, ...], plan: Plan) -> Planning:
    """The planning under which the fullest rank needs about the plan's number of micro-batches."""
    if not plan.token_budget:
        return Static(sequences=plan.per_micro_batch, group=plan.group)
    ranks = [local for batch in all_batches for local in batch.ranks]
    longest = max(
        sum(sequence.length for sequence in local[at : at + plan.group])
        for local in ranks
        for at in range(0, len(local), plan.group)
    )
    tokens = max(sum(sequence.length for sequence in local) for local in ranks)
    max_tokens = max(longest, -(-tokens // plan.num_micro_batches))
    return TokenBudget(max_tokens=max_tokens, group=plan.group)


def made_exact(batch: Batch, loss_mode: LossMode) -> Batch:
    """The batch with loss tokens changed so that every normaliser is a power of two."""
    sequences = list(batch.sequences)
    if loss_mode == "token-mean":
        missing = _next_power(batch.loss_tokens) - batch.loss_tokens
        for index, one in enumerate(sequences):
            more = min(missing, MAX_LENGTH - one.loss_tokens)
            sequences[index] = _with_more(one, more)
            missing -= more
    elif loss_mode.startswith("seq-mean"):
        bearing = [index for index, one in enumerate(sequences) if one.loss_tokens]
        for index in bearing[_next_power(len(bearing) + 1) // 2 :]:
            sequences[index] = replace(sequences[index], loss_tokens=0)
        if loss_mode == "seq-mean-token-mean":
            for index, one in enumerate(sequences):
                if one.loss_tokens:
                    missing = _next_power(one.loss_tokens) - one.loss_tokens
                    sequences[index] = _with_more(one, missing)
    remaining = iter(sequences)
    return Batch(ranks=tuple(tuple(next(remaining) for _ in local) for local in batch.ranks))


def ungated(batch: Batch) -> Batch:
    """The batch without a sequence that uses an optional part."""
    return Batch(
        ranks=tuple(tuple(replace(one, gated=False) for one in local) for local in batch.ranks)
    )


def _local(draw: DrawFn, plan: Plan) -> Local:
    num = plan.num_micro_batches * (1 if plan.token_budget else plan.per_micro_batch)
    if plan.token_budget:
        # Uneven between ranks; the planner must also bear a rank with too few.
        num = max(1, num + draw(st.sampled_from((0, 1, 2, -1)), label="more groups")) * plan.group
    local = [_sequence(draw, gated=True) for _ in range(num)]
    gates = plan.gated
    if plan.gated_by_rank:
        gates = draw(_gates(plan.num_micro_batches), label="gated micro-batches of a rank")
    if all(gates):
        return local
    for index, sequence in enumerate(local):
        position, within = divmod(index, plan.per_micro_batch)
        # A gated micro-batch has one gated sequence at least; the others are drawn.
        gated = gates[position] and (within == 0 or draw(st.booleans(), label="gated"))
        local[index] = replace(sequence, gated=gated)
    return local


def _sequence(draw: DrawFn, *, gated: bool) -> Sequence:
    loss_tokens = draw(st.sampled_from(_LOSS_TOKENS), label="loss tokens")
    length = max(draw(st.sampled_from(_LENGTHS), label="length"), loss_tokens)
    return Sequence(key=0, length=length, loss_tokens=loss_tokens, gated=gated)


def _micro_batches_differ(local: Local, plan: Plan) -> None:
    """Lengthen first sequences until the micro-batches have different numbers of loss tokens."""
    seen: set[int] = set()
    for first, total in _totals(local, plan.per_micro_batch).items():
        local[first] = _with_more(local[first], _until_new(total, seen))


def _ranks_differ(ranks: list[Local], plan: Plan) -> None:
    """Lengthen a sequence per rank until ranks differ and the batch has a loss token."""
    seen: set[int] = set() if len(ranks) > 1 else {0}
    for local in ranks:
        more = _until_new(sum(sequence.loss_tokens for sequence in local), seen)
        # The largest micro-batch grows: those that differ still do.
        totals = _totals(local, 1 if plan.token_budget else plan.per_micro_batch)
        first = max(totals, key=lambda at: totals[at])
        local[first] = _with_more(local[first], more)


def _totals(local: Local, size: int) -> dict[int, int]:
    """First index to number of loss tokens, for every `size` sequences."""
    return {
        first: sum(sequence.loss_tokens for sequence in local[first : first + size])
        for first in range(0, len(local), size)
    }


def _until_new(total: int, seen: set[int]) -> int:
    more = 0
    while total + more in seen:
        more += 1
    seen.add(total + more)
    return more


def _with_more(sequence: Sequence, loss_tokens: int) -> Sequence:
    wanted = sequence.loss_tokens + loss_tokens
    return replace(sequence, loss_tokens=wanted, length=max(sequence.length, wanted))


def _with_keys(ranks: list[Local]) -> tuple[tuple[Sequence, ...], ...]:
    keys = iter(range(sum(map(len, ranks))))
    return tuple(tuple(replace(sequence, key=next(keys)) for sequence in local) for local in ranks)


def _next_power(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()

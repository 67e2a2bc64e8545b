"""Cases by mesh, dtypes and model: what torch's wrappers do wrong in them.

Where a case's micro-batches decide, `unknown` is the answer for a plan that only the engine knows.
"""

from __future__ import annotations

import itertools

from fsdp_engine.contract.actions import Infer, Train
from fsdp_engine.contract.case import Case
from properties.issues import programs, usage


def shards(case: Case) -> bool:
    """Parameters are sharded: no rank holds them in full."""
    return case.mesh.shards > 1


def never_averages(case: Case) -> bool:
    """FSDP1 on replicas of one shard: NO_SHARD over the wrong axis."""
    return case.mesh.shards == 1 and case.mesh.replicas > 1 and programs.trains(case)


def rounds_running_sum(case: Case) -> bool:
    """FSDP1 with one shard and eager sync: the sum so far is cast to the reduce dtype again."""
    return (
        case.mesh.shards == 1
        and not case.engine.deferred
        and programs.rounds_in_reduce(case)
        and programs.trains(case)
    )


def surely_rounds_running_sum(case: Case) -> bool:
    """The same, where some sum is rounded."""
    return rounds_running_sum(case) and programs.surely_rounds_a_sum(case)


def clips_in_double(case: Case) -> bool:
    """FSDP1 with shards takes every norm in fp32, which torch refuses for fp64."""
    double = case.dtypes.storage == "float64"
    return case.mesh.shards > 1 and double and programs.steps(case)


def rounds_norm_on_some_ranks(case: Case) -> bool:
    """FSDP1 with shards in bf16: a rank that holds no gradient does not round the norm."""
    return case.mesh.shards > 1 and case.dtypes.storage == "bfloat16" and programs.steps(case)


def surely_rounds_norm_on_some_ranks(case: Case) -> bool:
    """Only the head trains, of fewer elements than there are ranks, and the first action steps."""
    model, first = case.model, case.program[0]
    only_head = model.family == "mlp" and model.units == 1 and model.frozen == "first_unit"
    few = not model.bias and 1 < model.vocab * model.width < case.mesh.shards
    stepped = isinstance(first, Train) and first.step and not case.exact
    return rounds_norm_on_some_ranks(case) and only_head and few and stepped


def zeroes_unordered(case: Case, *, unknown: bool) -> bool:
    """FSDP1 adds up reduced gradients of a unit in which some parameter has none of its own.

    `unknown`: what the plan of the micro-batches is taken for, and any way to have no gradient;
    without it a frozen parameter surely is in a unit with one that trains.
    """
    model = case.model
    mixed = bool(model.lora_rank) or (model.frozen == "biases" and model.family == "mlp")
    absent = model.frozen != "none" or model.optional != "none"
    changes = any(action.kind in ("freeze", "unfreeze") for action in case.program)
    without = mixed or (unknown and (absent or changes))
    reduced = case.mesh.shards == 1 or not case.engine.deferred
    counts = [usage.num_micro_batches(case, action.batch) for action in usage.training(case)]
    several = any(unknown if count is None else count > 1 for count in counts)
    return bool(without and reduced and several)


def ties_what_is_frozen(case: Case, *, at_once: bool) -> bool:
    """FSDP1 with one shard runs a wholly frozen unit with a tied parameter, weights are not cast.

    `at_once`: nothing else is cast either, then the first forward fails; else the one behind a
    backward may.
    """
    model, dtypes = case.model, case.dtypes
    uncast = not dtypes.mixed if at_once else dtypes.compute == dtypes.storage
    plain = case.mesh.shards == 1 and uncast
    return bool(plain and model.tied and model.lora_rank and programs.runs(case))


def exports_what_is_frozen(case: Case, *, at_once: bool) -> bool:
    """FSDP1 with one shard, the root wholly frozen and nothing cast: no state dict of the root."""
    plain = case.mesh.shards == 1 and not case.dtypes.mixed
    return bool(
        plain and case.model.lora_rank and programs.exports_after_training(case, at_once=at_once)
    )


def keeps_unused_gathered(case: Case) -> bool:
    """ZeRO-2: a forward without backward gathers an optional unit, and a batch is trained."""
    optional = case.model.optional in ("unit", "either")
    infers = any(isinstance(action, Infer) for action in case.program)
    return optional and infers and not case.engine.reshard_after_forward and programs.trains(case)


def surely_keeps_unused_gathered(case: Case) -> bool:
    """The same of a unit that the micro-batch at once behind the forward does not use."""
    if case.model.optional != "unit" or not keeps_unused_gathered(case):
        return False
    for before, after in itertools.pairwise(case.program):
        if isinstance(before, Infer) and isinstance(after, Train):
            gathered, used = (usage.used_parts(case, action.batch) for action in (before, after))
            if gathered and used and any(gathered[0]) and not used[0][0]:
                return True
    return False


def ties_in_low_precision(case: Case, *, unknown: bool) -> bool:
    """FSDP1 with one shard keeps a tied parameter's gradient in the compute dtype in `no_sync`."""
    casts = case.dtypes.compute != case.dtypes.storage
    kept = case.mesh.shards == 1 and case.model.tied and not case.model.lora_rank
    return casts and kept and usage.accumulates(case, unknown=unknown)


def skips_unit_in_the_last(case: Case, *, unknown: bool) -> bool:
    """FSDP1 with shards: deferred gradients of a unit that the last backward does not reach."""
    return case.mesh.shards > 1 and usage.skips_unit_in_the_last(case, unknown=unknown)


def leaves_unit_unreduced(case: Case, *, unknown: bool) -> bool:
    """FSDP1 with one shard: such a unit's gradient is left as it was, in the compute dtype."""
    casts = case.dtypes.compute != case.dtypes.storage
    return case.mesh.shards == 1 and casts and usage.skips_unit_in_the_last(case, unknown=unknown)


def steps_without_use(case: Case, *, unknown: bool) -> bool:
    """FSDP1: a parameter that no rank used, in a unit that ran, is stepped with zeros."""
    return usage.steps_without_use(case, unknown=unknown)


def surely_steps_without_use(case: Case) -> bool:
    """The same with a step of AdamW that decays weights far enough for fp32 to see it."""
    optimizer = case.optimizer
    decays = optimizer.kind == "adamw" and optimizer.weight_decay * optimizer.lr >= 2.0**-12
    steady = programs.never_frozen(case) and case.dtypes.storage == "float32"
    at_once = not optimizer.warmup_steps and optimizer.schedule == "constant"
    return decays and steady and at_once and steps_without_use(case, unknown=False)


def reduces_other_sizes(case: Case, *, unknown: bool) -> bool:
    """FSDP2: ranks reduce different numbers of elements together."""
    many = case.mesh.world_size > 1
    return many and usage.uses_on_some_ranks(case, equal_sizes=False, unknown=unknown)


def reduces_other_parameters(case: Case) -> bool:
    """FSDP2: ranks reduce different parameters of one size together."""
    many = case.mesh.world_size > 1
    return many and usage.uses_on_some_ranks(case, equal_sizes=True, unknown=False)


def meets_fresh_gradient(case: Case, *, unknown: bool) -> bool:
    """FSDP2: accumulated gradients in the reduce dtype beside one in the compute dtype."""
    differ = case.dtypes.compute != case.dtypes.reduce
    return differ and usage.uses_first_in_the_last(case, unknown=unknown)


def accumulates_what_never_ran(case: Case, *, unknown: bool) -> bool:
    """FSDP2: asks a parameter that was never gathered for its unsharded gradient."""
    differ = case.dtypes.compute != case.dtypes.reduce
    return differ and usage.runs_unit_late(case, unknown=unknown)


def unfreezes_mixed(case: Case, *, must_raise: bool) -> bool:
    """FSDP2: a unit's dtypes are taken from what trains in the first forward, here nothing."""
    steady = case.model.optional == "none"
    return (
        case.dtypes.mixed
        and (steady or not must_raise)
        and programs.trains_what_began_frozen(case, must_raise=must_raise)
    )

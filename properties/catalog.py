"""The properties by their stable names: which check judges which promise.

The name goes into reports, case files and file names; the check is where the judging is. A check
that is not listed has its own dotted path as its name, so that checks kept elsewhere can be judged
and replayed as well.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TypeAlias, cast

from fsdp_engine.contract.case import Case
from fsdp_engine.contract.errors import FsdpPropertiesError
from fsdp_engine.contract.protocol import Run
from oracles.verdict import Verdict

Check: TypeAlias = Callable[[Case, Run], Verdict]

PROPERTIES: dict[str, str] = {
    "gradient-matches-oracle": "properties.checks.gradients:match_oracle",
    "replicas-agree": "properties.checks.gradients:replicas_agree",
    "gradient-is-exact": "properties.checks.exact:match_truth_bitwise",
    "deferred-equals-eager": "properties.checks.deferral:deferred_equals_eager",
    "split-invariance": "properties.checks.split:partition_invariance",
    "strategy-is-total": "properties.checks.strategy:strategy_is_total",
    "mesh-is-total": "properties.checks.strategy:mesh_is_total",
    "every-unit-is-reduced": "properties.checks.communication:reduces_every_unit",
    "collectives-agree-in-groups": "properties.checks.communication:same_in_every_group",
    "collectives-match-schedule": "properties.checks.communication:matches_schedule",
    "residency-matches-strategy": "properties.checks.residency:matches_strategy",
    "retained-bytes-match": "properties.checks.residency:retained_bytes",
    "micro-batches-partition": "properties.checks.planner:is_exact_partition",
    "entry-points-agree": "properties.checks.configuration:entry_points_agree",
    "every-field-is-probed": "properties.checks.configuration:every_field_is_probed",
    "illegal-configuration-is-refused": "properties.checks.configuration:illegal_is_refused",
    "configuration-field-is-observable": "properties.checks.configuration:field_is_observable",
    "norm-and-clip-match-oracle": "properties.checks.step:norm_and_clip",
    "non-finite-step-changes-nothing": "properties.checks.non_finite:changes_nothing",
    "optimizer-step-matches-oracle": "properties.checks.step:optimizer_step",
    "learning-rate-matches-schedule": "properties.checks.step:learning_rates",
    "interrupted-batch-changes-nothing": "properties.checks.atomicity:changes_nothing",
    "inference-changes-nothing": "properties.checks.inference:changes_nothing",
    "infer-matches-oracle": "properties.checks.inference:matches_oracle",
    "metrics-match-oracle": "properties.checks.metrics:match_oracle",
    "freezing-matches-oracle": "properties.checks.freezing:frozen_match_oracle",
    "unused-parameters-stay": "properties.checks.freezing:unused_stay",
    "restore-takes-effect": "properties.checks.freezing:restore_takes_effect",
    "resume-equals-uninterrupted": "properties.checks.checkpoint:resume_equals_uninterrupted",
    "resharded-resume-goes-on": "properties.checks.checkpoint:resharded_goes_on",
    "save-changes-nothing": "properties.checks.checkpoint:save_changes_nothing",
    "damaged-checkpoint-is-refused": "properties.checks.checkpoint:damaged_is_refused",
    "export-matches-oracle": "properties.checks.export:match_oracle",
    "staged-export-equals-unstaged": "properties.checks.export:staged_equals_unstaged",
    "export-changes-nothing": "properties.checks.export:changes_nothing",
    "two-phase-sync-equals-merged": "properties.checks.lora:two_phase_equals_merged",
    "adapter-switch-matches-oracle": "properties.checks.lora:switch_matches_oracle",
    "tensors-rest-where-asked": "properties.checks.offload:rests_where_asked",
    "offload-changes-nothing": "properties.checks.offload:offload_changes_nothing",
    "device-memory-matches-oracle": "properties.checks.device:memory_matches",
    "device-peak-matches-oracle": "properties.checks.device:peaks_match",
    "device-copies-are-needed": "properties.checks.device:copies_are_needed",
    "device-order-is-kept": "properties.checks.device:order_is_kept",
}


class UnknownPropertyError(FsdpPropertiesError):
    """A name that leads to no check."""


def property_id(check: Check) -> str:
    """The stable name of a check."""
    path = f"{check.__module__}:{check.__qualname__}"
    for name, listed in PROPERTIES.items():
        if listed == path:
            return name
    return path


def load_check(name: str) -> Check:
    """The check of a property, or the one at a path `package.module:function`.

    Raises:
        UnknownPropertyError: neither; the message names it and the legal names.
    """
    path = PROPERTIES.get(name, name)
    module_name, colon, attribute = path.partition(":")
    legal = f"legal are package.module:function, {', '.join(sorted(PROPERTIES))}"
    if not (module_name and colon and attribute):
        raise UnknownPropertyError(f"property: {name!r} is unknown; {legal}")
    try:
        check = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise UnknownPropertyError(f"property: {name!r} is unknown ({error}); {legal}") from error
    return cast(Check, check)


def descriptions() -> dict[str, str]:
    """A sentence for every property: what its check says it promises."""
    return {
        name: (load_check(name).__doc__ or "").strip().partition("\n")[0] for name in PROPERTIES
    }

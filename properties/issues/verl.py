"""The known failures of verl 0.9.1's FSDP engine, on torch 2.13 with gloo.

`OWN` are verl's; what torch's wrappers do wrong shows under verl as well, and `inherited` says so.
The scripts that are referred to show each by itself: `docs/findings/README.md`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial

from fsdp_engine.contract.actions import (
    Export,
    Load,
    Reject,
    Restore,
    Resume,
    Train,
    ability_for,
    asks_for_step,
)
from fsdp_engine.contract.batch import TokenBudget
from fsdp_engine.contract.case import Case, Strategy
from properties.issues import programs, usage
from properties.issues.issue import KnownIssue, Predicate, under

ENGINE = "verl"
FINDINGS = "docs/findings"
_ISSUES = "https://github.com/verl-project/verl/issues"
_SOURCE = "https://github.com/verl-project/verl/blob/v0.9.1/verl"
_GRADIENTS = ("gradient-matches-oracle",)
_EXPORTS = (
    "export-matches-oracle", "export-changes-nothing", "staged-export-equals-unstaged",
    "two-phase-sync-equals-merged", "adapter-switch-matches-oracle", "inference-changes-nothing",
)  # fmt: skip


def inherited(issues: Collection[KnownIssue]) -> tuple[KnownIssue, ...]:
    """Torch's issues as verl shows them."""
    return tuple(
        replace(
            issue,
            id=f"verl-{issue.id}",
            engines=(ENGINE,),
            hits=under(_strategy(issue), partial(_adapted, issue.id, issue.hits)),
            must=under(_strategy(issue), partial(_adapted, issue.id, issue.must)),
        )
        for issue in issues
    )


def _strategy(issue: KnownIssue) -> Strategy:
    return "fsdp1" if "torch_fsdp1" in issue.engines else "fsdp2"


def _adapted(issue: str, predicate: Predicate, case: Case) -> bool:
    """Verl asks FSDP2 to reshard the root too, which torch by itself leaves gathered."""
    root_stays = issue.startswith("fsdp2") and "gathered" in issue
    return predicate(case) and not (root_stays and case.engine.reshard_after_forward)


def any_case(case: Case) -> bool:  # noqa: ARG001  a table has no part in a case
    """A question that is not about a case."""
    return True


def overrides(case: Case) -> bool:
    """Raw configuration fields are set."""
    return bool(case.engine.overrides)


def accumulates_low(case: Case) -> bool:
    """Deferred gradients of a coarser dtype than that of their reduction."""
    differ = case.dtypes.compute != case.dtypes.reduce
    return differ and usage.accumulates(case, unknown=True)


def surely_accumulates_low(case: Case) -> bool:
    """The same with two micro-batches that have loss, and a gradient of many elements."""
    return accumulates_low(case) and programs.surely_rounds_a_sum(case)


def exports(case: Case, *weights: str) -> bool:
    """Some export is of these weights."""
    return any(isinstance(a, Export) and a.weights in weights for a in case.program)


def merges_wide(case: Case) -> bool:
    """Merged weights are exported that are stored wider than in bf16."""
    return case.dtypes.storage == "float32" and exports(case, "merged")


def surely_merges_wide(case: Case) -> bool:
    """The same, and something is taken of it."""
    return merges_wide(case) and all(
        action.drain == "full" or action.after > 0
        for action in case.program
        if isinstance(action, Export)
    )


def merges_root(case: Case) -> bool:
    """An adapter of the root's own layers is merged."""
    on_root = case.model.lora_targets in ("root", "all")
    merged = any(getattr(action, "adapter", "") == "merged" for action in case.program)
    return on_root and (merged or exports(case, "merged"))


def surely_merges_root(case: Case) -> bool:
    """The same in the storage dtype of the export, with a scale above zero, taken to its end."""
    whole = all(a.drain == "full" for a in case.program if isinstance(a, Export))
    narrow = case.dtypes.storage == "bfloat16" and case.model.lora_alpha > 0
    return merges_root(case) and whole and narrow and exports(case, "merged")


def adapts_embedding_of_transformers(case: Case) -> bool:
    """The adapter of an untied language model is on its embedding."""
    model = case.model
    on_root = model.lora_targets in ("root", "all")
    return model.is_language and on_root and not model.tied and bool(model.lora_rank)


def exports_adapter(case: Case) -> bool:
    """The adapter alone is exported, and all of it is taken."""
    return any(
        isinstance(a, Export) and a.weights == "adapter" and a.drain == "full" for a in case.program
    )


def resumes_behind_write(case: Case) -> bool:
    """An export is held while weights are written, and taken on."""
    held = written = False
    for action in case.program:
        if isinstance(action, Export) and action.drain == "hold":
            held, written = True, False
        elif isinstance(action, Resume):
            if held and written:
                return True
            held = False
        written |= asks_for_step(action) or isinstance(action, Restore | Load)
    return False


def surely_resumes_behind_write(case: Case) -> bool:
    """Nothing but an export that is held, a step that moves the weights, and the rest."""
    kinds = [action.kind for action in case.program]
    steps = any(isinstance(action, Train) and action.step for action in case.program)
    moves = case.optimizer.lr * min(1.0, case.optimizer.clip_grad) >= 2.0**-9
    moves = moves and not case.optimizer.warmup_steps and case.dtypes.storage == "float32"
    plain = programs.is_alive(case) and programs.never_frozen(case)
    return kinds == ["export", "train", "resume"] and steps and moves and plain


def breaks_base(case: Case) -> bool:
    """The base is exported, and some rank holds only a part of it."""
    return case.mesh.shards > 1 and exports(case, "base")


def goes_on_elsewhere(case: Case) -> bool:
    """A checkpoint is loaded on another mesh or by another strategy."""
    return any(ability_for(action) == "reshard" for action in case.program)


def changes_mesh(case: Case) -> bool:
    """A checkpoint is loaded on another mesh."""
    meshes = {a.shape for a in case.program if isinstance(a, Load) and a.shape}
    return bool(meshes - {case.mesh.shape})


def rejects(case: Case, *damages: str) -> bool:
    """A checkpoint with such damage is loaded."""
    return any(isinstance(a, Reject) and a.damage in damages for a in case.program)


def plans_by_tokens(case: Case) -> bool:
    """Ranks plan their micro-batches by tokens."""
    return isinstance(case.engine.planning, TokenBudget) and case.mesh.world_size > 1


def asks_too_many(case: Case) -> bool:
    """The fullest rank needs more micro-batches than the emptiest has groups."""
    planning = case.engine.planning
    if not isinstance(planning, TokenBudget) or not programs.trains(case):
        return False
    batches = [case.batches[action.batch] for action in usage.training(case)]
    return any(
        max(-(-sum(s.length for s in rank) // planning.max_tokens) for rank in batch.ranks)
        > min(len(rank) // planning.group for rank in batch.ranks)
        for batch in batches
    )


OWN = (
    KnownIssue(
        id="verl-entry-points-disagree",
        engines=(ENGINE,),
        reason="the dataclass defers gradient sync by default and the YAML file does not; four "
        "more fields are in the dataclass alone",
        reference=f"{FINDINGS}/verl_sync_default.py",
        hits=any_case,
        must=any_case,
        ends=("Failed",),
        says=("use_no_sync_for_gradient_accumulation",),
        properties=("entry-points-agree",),
    ),
    KnownIssue(
        id="verl-mesh-of-any-size",
        engines=(ENGINE,),
        reason="fsdp_size 0 is a ZeroDivisionError, and one that does not divide the world gives a "
        "mesh that leaves ranks out",
        reference=f"{FINDINGS}/verl_fsdp_size.py",
        hits=any_case,
        must=any_case,
        ends=("Failed",),
        says=("ZeroDivisionError", "should be ConfigError naming"),
        properties=("mesh-is-total",),
    ),
    KnownIssue(
        id="verl-illegal-values-are-taken",
        engines=(ENGINE,),
        reason="of its fields verl checks the strategy and the scheduler's name alone: other "
        "illegal values run, or fail somewhere inside",
        reference=f"{_ISSUES}/7923",
        hits=overrides,
        must=lambda case: ("clip_grad", -1.0) in case.engine.overrides,
        ends=("Failed",),
        says=("should be ConfigError on every rank",),
        properties=("illegal-configuration-is-refused",),
    ),
    KnownIssue(
        id="verl-idle-fields",
        engines=(ENGINE,),
        reason="fields that the chosen strategy does not read are taken and do nothing",
        reference=f"{_SOURCE}/workers/config/engine.py",
        hits=overrides,
        must=lambda case: ("wrap_policy.min_num_params", 1) in case.engine.overrides,
        ends=("Failed",),
        says=("another observable",),
        properties=("configuration-field-is-observable",),
    ),
    KnownIssue(
        id="verl-fsdp1-deferred-adds-in-compute-dtype",
        engines=(ENGINE,),
        reason="no_sync adds gradients up in the compute dtype, though reduce_dtype is fp32",
        reference=f"{FINDINGS}/verl_fsdp1_deferred_bf16.py",
        hits=under("fsdp1", accumulates_low),
        must=under("fsdp1", surely_accumulates_low),
        ends=("Failed",),
        must_in=_GRADIENTS,
    ),
    KnownIssue(
        id="verl-merged-export-in-bf16",
        engines=(ENGINE,),
        reason="merged weights are exported in bf16 whatever they are stored in; base and plain "
        "weights are not",
        reference=f"{_SOURCE}/workers/engine/fsdp/transformer_impl.py#L1066",
        hits=merges_wide,
        must=surely_merges_wide,
        ends=("Failed",),
        properties=_EXPORTS,
        must_in=("export-matches-oracle",),
    ),
    KnownIssue(
        id="verl-root-adapter-is-not-merged",
        engines=(ENGINE,),
        reason="FSDP2 merges unit by unit and skips the root, so adapters on its own layers are "
        "left out; with FSDP1 both adapters of a tied pair go into its one weight",
        reference=f"{FINDINGS}/verl_fsdp2_root_adapter.py",
        hits=merges_root,
        must=under("fsdp2", surely_merges_root),
        ends=("Failed",),
        properties=_EXPORTS,
        must_in=("export-matches-oracle",),
    ),
    KnownIssue(
        id="verl-fsdp2-adapter-on-embedding",
        engines=(ENGINE,),
        reason="an embedding with an adapter is wrapped by its name and once more inside by its "
        "class, which FSDP2 refuses",
        reference=f"{_SOURCE}/utils/fsdp_utils.py#L549",
        hits=under("fsdp2", adapts_embedding_of_transformers),
        must=under("fsdp2", adapts_embedding_of_transformers),
        ends=("RaisedTypeError",),
        says=("object layout differs",),
    ),
    KnownIssue(
        id="verl-fsdp1-base-export-breaks",
        engines=(ENGINE,),
        reason="the base is moved to the host while it is gathered; then the process ends, or "
        "FSDP1 finds a storage that it cannot resize",
        reference=f"{_ISSUES}/7062",
        hits=under("fsdp1", lambda case: exports(case, "base")),
        must=under("fsdp1", breaks_base),
        ends=("Died", "RaisedRuntimeError", "Failed", "RaisedAssertionError"),
        properties=_EXPORTS,
    ),
    KnownIssue(
        id="verl-fsdp1-adapter-export-is-empty",
        engines=(ENGINE,),
        reason="peft looks for the adapter by names that FSDP1 has put a prefix into, and finds "
        "none; taken layer by layer the fallback then gathers to the host, which torch refuses "
        "on one",
        reference=f"{FINDINGS}/verl_fsdp1_adapter_export.py",
        hits=under("fsdp1", lambda case: exports(case, "adapter")),
        must=under("fsdp1", exports_adapter),
        ends=("Failed", "Died", "RaisedRuntimeError"),
        properties=_EXPORTS,
        must_in=("export-matches-oracle",),
    ),
    KnownIssue(
        id="verl-fsdp2-export-of-the-moment",
        engines=(ENGINE,),
        reason="an export hands out references to live shards: what is taken behind a step has "
        "the weights of then, and one export has both",
        reference=f"{FINDINGS}/verl_fsdp2_export_moment.py",
        hits=under("fsdp2", resumes_behind_write),
        must=under("fsdp2", surely_resumes_behind_write),
        ends=("Failed",),
        properties=("export-matches-oracle",),
    ),
    KnownIssue(
        id="verl-checkpoint-of-one-mesh",
        engines=(ENGINE,),
        reason="a rank loads its own file only, which has its shards of the mesh that saved it; "
        "on another mesh or by another strategy torch stops half way",
        reference=f"{_SOURCE}/utils/checkpoint/fsdp_checkpoint_manager.py#L152",
        hits=goes_on_elsewhere,
        must=changes_mesh,
        ends=(
            "RaisedCheckpointError", "RaisedRuntimeError", "RaisedAssertionError", "Failed", "Hung",
        ),
        properties=("resharded-resume-goes-on",),
    ),
    KnownIssue(
        id="verl-damaged-checkpoint-is-loaded",
        engines=(ENGINE,),
        reason="nothing is checked before a checkpoint is loaded: a flipped bit goes into the "
        "weights, and what one rank cannot read leaves the others in a barrier",
        reference=f"{FINDINGS}/verl_damaged_checkpoint.py",
        hits=lambda case: rejects(case, "flipped", "truncated", "missing", "foreign"),
        must=lambda case: case.mesh.world_size > 1 and rejects(case, "missing", "truncated"),
        ends=("Failed", "Hung", "Died", "RaisedRuntimeError"),
        properties=("damaged-checkpoint-is-refused",),
    ),
    KnownIssue(
        id="verl-plans-as-many-as-the-emptiest",
        engines=(ENGINE,),
        reason="a batch whose fullest rank needs more micro-batches than another rank has "
        "sequences is refused when it is trained, with a ValueError on all ranks",
        reference=f"{_SOURCE}/utils/seqlen_balancing.py#L446",
        hits=plans_by_tokens,
        must=asks_too_many,
        ends=("RaisedValueError",),
        says=("Cannot satisfy max_token_len",),
    ),
)  # fmt: skip
"""verl's own, the most general first."""

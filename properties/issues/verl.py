"""The known failures of verl 0.9.1's FSDP engine, on torch 2.13 with gloo.

`OWN` are verl's; what torch's wrappers do wrong shows under verl as well, and `inherited` says so.
The scripts that are referred to show each by itself: `docs/findings/verl.md`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial

from fsdp_engine.contract.case import Case
from properties.issues import programs
from properties.issues import verl_defects as defects
from properties.issues.issue import KnownIssue, Predicate, under

ENGINE = "verl"
FINDINGS = "docs/findings"
_ISSUES = "https://github.com/verl-project/verl/issues"
_SOURCE = "https://github.com/verl-project/verl/blob/v0.9.1/verl"
_PYTORCH = "https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/fsdp"
_IN_OWN_FORM = ("fsdp1-no-shard-exports-no-frozen-root",)
_GRADIENTS = ("gradient-matches-oracle",)
_REPLAYED = (
    "gradient-matches-oracle", "deferred-equals-eager", "split-invariance", "infer-matches-oracle",
    "adapter-switch-matches-oracle", "metrics-match-oracle", "norm-and-clip-match-oracle",
    "optimizer-step-matches-oracle",
)  # fmt: skip
_EXPORTS = (
    "export-matches-oracle", "export-changes-nothing", "staged-export-equals-unstaged",
    "two-phase-sync-equals-merged", "adapter-switch-matches-oracle", "inference-changes-nothing",
)  # fmt: skip


def inherited(issues: Collection[KnownIssue]) -> tuple[KnownIssue, ...]:
    """Torch's issues as verl shows them, but for those that it has in a form of its own."""
    return tuple(
        replace(
            issue,
            id=f"verl-{issue.id}",
            engines=(ENGINE,),
            hits=partial(_adapted, issue.id, issue.hits),
            must=partial(_surely_adapted, issue.id, issue.must),
        )
        for issue in issues
        if issue.id not in _IN_OWN_FORM
    )


def _adapted(issue: str, predicate: Predicate, case: Case) -> bool:
    """Verl asks FSDP2 to reshard the root too, which torch by itself leaves gathered."""
    root_stays = issue.startswith("fsdp2") and "gathered" in issue
    return predicate(case) and not (root_stays and case.engine.reshard_after_forward)


def _surely_adapted(issue: str, predicate: Predicate, case: Case) -> bool:
    """Offloading moves everything between actions, and what torch got wrong may go with it."""
    return _adapted(issue, predicate, case) and not case.engine.param_offload


OWN = (
    KnownIssue(
        id="verl-entry-points-disagree",
        engines=(ENGINE,),
        reason="the dataclass defers gradient sync by default and the YAML file does not; four "
        "more fields are in the dataclass alone",
        reference=f"{FINDINGS}/verl_sync_default.py",
        hits=defects.any_case,
        must=defects.any_case,
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
        hits=defects.any_case,
        must=defects.any_case,
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
        hits=defects.overrides,
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
        hits=defects.overrides,
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
        hits=under("fsdp1", defects.accumulates_low),
        must=under("fsdp1", defects.surely_accumulates_low),
        ends=("Failed",),
        must_in=_GRADIENTS,
    ),
    KnownIssue(
        id="verl-merged-export-in-bf16",
        engines=(ENGINE,),
        reason="merged weights are exported in bf16 whatever they are stored in; base and plain "
        "weights are not",
        reference=f"{_SOURCE}/workers/engine/fsdp/transformer_impl.py#L1066",
        hits=defects.merges_wide,
        must=defects.surely_merges_wide,
        ends=("Failed",),
        properties=(
            "export-matches-oracle", "two-phase-sync-equals-merged",
            "adapter-switch-matches-oracle",
        ),
        must_in=("export-matches-oracle",),
    ),
    KnownIssue(
        id="verl-merged-while-exported",
        engines=(ENGINE,),
        reason="weights are merged in place from a merged export's first tensor to its last: what "
        "is saved meanwhile has the adapter in its base, and a batch trains no adapter",
        reference=f"{FINDINGS}/verl_merged_while_exported.py",
        hits=defects.is_merged_meanwhile,
        must=defects.surely_is_merged_meanwhile,
        ends=("Failed",),
        must_in=("export-changes-nothing",),
    ),
    KnownIssue(
        id="verl-root-adapter-is-not-merged",
        engines=(ENGINE,),
        reason="FSDP2 merges unit by unit and skips the root, so adapters on its own layers are "
        "left out; with FSDP1 both adapters of a tied pair go into its one weight",
        reference=f"{FINDINGS}/verl_fsdp2_root_adapter.py",
        hits=defects.merges_root,
        must=under("fsdp2", defects.surely_merges_root),
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
        hits=under("fsdp2", defects.adapts_embedding_of_transformers),
        must=under("fsdp2", defects.adapts_embedding_of_transformers),
        ends=("RaisedTypeError",),
        says=("object layout differs",),
    ),
    KnownIssue(
        id="verl-fsdp1-base-export-breaks",
        engines=(ENGINE,),
        reason="the base is moved to the host while it is gathered; then the process ends, or "
        "FSDP1 finds a storage that it cannot resize",
        reference=f"{_ISSUES}/7062",
        hits=under("fsdp1", lambda case: defects.exports(case, "base")),
        must=under("fsdp1", defects.breaks_base),
        ends=("Died", "RaisedRuntimeError", "Failed", "RaisedAssertionError"),
        properties=_EXPORTS,
        devices=("cpu",),
    ),
    KnownIssue(
        id="verl-lora-exports-on-the-host",
        engines=(ENGINE,),
        reason="base and adapter are gathered to the host and yielded there; merged and plain "
        "weights are on the device",
        reference=f"{_SOURCE}/utils/fsdp_utils.py#L715",
        hits=lambda case: defects.exports(case, "base", "adapter"),
        must=under("fsdp2", defects.surely_exports_apart),
        ends=("Failed",),
        says=("got cpu, should be",),
        must_in=("tensors-rest-where-asked",),
        devices=("sim", "cuda"),
    ),
    KnownIssue(
        id="verl-fsdp1-adapter-export-is-empty",
        engines=(ENGINE,),
        reason="peft looks for the adapter by names that FSDP1 has put a prefix into, and finds "
        "none; taken layer by layer the fallback then gathers to the host, which torch refuses "
        "on one",
        reference=f"{FINDINGS}/verl_fsdp1_adapter_export.py",
        hits=under("fsdp1", lambda case: defects.exports(case, "adapter")),
        must=under("fsdp1", defects.exports_adapter),
        ends=("Failed", "Died", "RaisedRuntimeError", "RaisedNotImplementedError"),
        properties=_EXPORTS,
        must_in=("export-matches-oracle",),
    ),
    KnownIssue(
        id="verl-plans-by-reading-the-device",
        engines=(ENGINE,),
        reason="a batch goes to the device whole and is taken apart there, jagged tensor by jagged "
        "tensor: lengths and rows are read back one by one, more than twice the copies that the "
        "micro-batches need (two reads for each are those of the loss that the adapter hands in)",
        reference="docs/engines-verl.md",
        hits=programs.trains,
        must=programs.trains,
        ends=("Failed",),
        properties=("device-copies-are-needed",),
        devices=("sim", "cuda"),
    ),
    KnownIssue(
        id="verl-fsdp1-buffers-stay-on-the-device",
        engines=(ENGINE,),
        reason="param_offload moves FSDP1's flat parameters and leaves the buffers on the device; "
        "under FSDP2 they go with the module",
        reference=f"{_SOURCE}/utils/fsdp_utils.py#L178",
        hits=under("fsdp1", defects.offloads_buffers),
        must=under("fsdp1", defects.offloads_buffers),
        ends=("Failed",),
        says=("buffers: got", "export host_to_device copies", "export device_to_host copies"),
        properties=("tensors-rest-where-asked", "device-copies-are-needed"),
        must_in=("tensors-rest-where-asked",),
        devices=("sim", "cuda"),
    ),
    KnownIssue(
        id="verl-merges-by-way-of-the-host",
        engines=(ENGINE,),
        reason="the whole base is copied to the host before a merge and back behind it, one "
        "parameter after the other, also what has no adapter",
        reference=f"{_SOURCE}/utils/fsdp_utils.py#L1022",
        hits=defects.merges,
        must=defects.surely_merges_on_the_device,
        ends=("Failed",),
        says=("copies: got",),
        properties=("device-copies-are-needed",),
        devices=("sim", "cuda"),
    ),
    KnownIssue(
        id="verl-fsdp1-offloads-not-what-is-gathered",
        engines=(ENGINE,),
        reason="an exception leaves units gathered, and offloading moves their shards alone: the "
        "parameters stay on the device",
        reference=f"{_SOURCE}/utils/fsdp_utils.py#L169",
        hits=under("fsdp1", defects.is_interrupted_gathered),
        must=under("fsdp1", defects.surely_is_interrupted_gathered),
        ends=("Failed",),
        says=("parameters: got",),
        properties=("tensors-rest-where-asked",),
        devices=("sim", "cuda"),
    ),
    KnownIssue(
        id="verl-fsdp2-offloads-what-is-gathered",
        engines=(ENGINE,),
        reason="under ZeRO-2 an exception in a forward leaves units gathered, and offloading moves "
        "the module: torch takes the gathered tensors for the shards, and stops half way",
        reference=f"{FINDINGS}/verl_fsdp2_offload_interrupted.py",
        hits=under("fsdp2", defects.is_interrupted_unresharded),
        must=under("fsdp2", defects.surely_is_interrupted_unresharded),
        ends=("RaisedAttributeError",),
        says=("'Parameter' object has no attribute",),
        devices=("sim", "cuda"),
    ),
    KnownIssue(
        id="verl-fsdp2-export-of-the-moment",
        engines=(ENGINE,),
        reason="an export hands out references to live shards: what is taken behind a step has "
        "the weights of then, and one export has both",
        reference=f"{FINDINGS}/verl_fsdp2_export_moment.py",
        hits=under("fsdp2", defects.resumes_behind_write),
        must=under("fsdp2", defects.surely_resumes_behind_write),
        ends=("Failed",),
        properties=("export-matches-oracle",),
    ),
    KnownIssue(
        id="verl-fsdp1-no-shard-exports-no-frozen-units",
        engines=(ENGINE,),
        reason="with NO_SHARD the parameters of a wholly frozen unit stay registered as tensors "
        "behind a backward, so the state dict has no place for them; every base weight with an "
        "adapter beside it is in such a unit",
        reference=f"{_PYTORCH}/_state_dict_utils.py#L227",
        hits=under("fsdp1", defects.exports_frozen_units),
        must=under("fsdp1", defects.surely_exports_frozen_units),
        ends=("RaisedAssertionError",),
        says=("param_name=",),
        must_in=("export-matches-oracle",),
    ),
    KnownIssue(
        id="verl-fsdp2-first-forward-without-adapter",
        engines=(ENGINE,),
        reason="a unit takes its dtypes from the parameters that train at the first forward; "
        "without the adapter there are none, and its gradient is not cast back",
        reference="https://github.com/pytorch/pytorch/issues/186998",
        hits=under("fsdp2", defects.first_runs_without_adapter),
        must=under("fsdp2", defects.surely_first_runs_without_adapter),
        ends=("Failed", "RaisedRuntimeError"),
        says=("grad_dtype", "gradient"),
    ),
    KnownIssue(
        id="verl-rotary-frequencies-in-bf16",
        engines=(ENGINE,),
        reason="a module of bf16 is cast as a whole, with the rotary frequencies that transformers "
        "keeps in fp32: positions are turned by other angles, the more the further back",
        reference=f"{FINDINGS}/verl_rotary_bf16.py",
        hits=defects.turns_by_rounded_angles,
        must=defects.surely_turns_by_rounded_angles,
        ends=("Failed",),
        properties=_REPLAYED,
        must_in=_GRADIENTS,
    ),
    KnownIssue(
        id="verl-exports-buffers-in-bf16",
        engines=(ENGINE,),
        reason="a module of bf16 is cast as a whole, with the buffers that transformers leaves in "
        "fp32; FSDP1, which computes with them in fp32, exports them as they were cast",
        reference=f"{FINDINGS}/verl_rotary_bf16.py",
        hits=defects.exports_low_buffers,
        must=defects.surely_exports_low_buffers,
        ends=("Failed",),
        says=("dtype: got bfloat16",),
        properties=_EXPORTS,
        must_in=("export-matches-oracle",),
    ),
    KnownIssue(
        id="verl-fsdp1-evaluation-before-a-forward",
        engines=(ENGINE,),
        reason="leaving the evaluation mode reshards the root, whose shards FSDP1 makes at the "
        "first forward only",
        reference=f"{FINDINGS}/verl_fsdp1_eval_first.py",
        hits=under("fsdp1", defects.leaves_evaluation_unused),
        must=under("fsdp1", defects.surely_leaves_evaluation_unused),
        ends=("RaisedAttributeError",),
        says=("_local_shard",),
    ),
    KnownIssue(
        id="verl-fsdp2-merges-no-few-rows",
        engines=(ENGINE,),
        reason="a module is gathered for the merge with FSDP1's call, which does nothing to FSDP2, "
        "so the adapter is added to a sharded weight in place: torch refuses that where the weight "
        "has fewer rows than there are shards",
        reference=f"{FINDINGS}/verl_fsdp2_few_rows.py",
        hits=under("fsdp2", defects.merges_few_rows),
        must=under("fsdp2", defects.surely_merges_few_rows),
        ends=("RaisedRuntimeError",),
        says=("in-place operations that require placement changes",),
    ),
    KnownIssue(
        id="verl-checkpoint-of-one-mesh",
        engines=(ENGINE,),
        reason="a rank loads its own file only, which has its shards of the mesh that saved it; "
        "on another mesh or by another strategy torch stops half way",
        reference=f"{_SOURCE}/utils/checkpoint/fsdp_checkpoint_manager.py#L152",
        hits=defects.goes_on_elsewhere,
        must=defects.changes_mesh,
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
        hits=lambda case: defects.rejects(case, "flipped", "truncated", "missing", "foreign"),
        must=defects.leaves_others_waiting,
        ends=("Failed", "Hung", "Died", "RaisedRuntimeError"),
        properties=("damaged-checkpoint-is-refused",),
    ),
    KnownIssue(
        id="verl-plans-as-many-as-the-emptiest",
        engines=(ENGINE,),
        reason="a batch whose fullest rank needs more micro-batches than another rank has "
        "sequences is refused when it is trained, with a ValueError on all ranks",
        reference=f"{_SOURCE}/utils/seqlen_balancing.py#L446",
        hits=defects.plans_by_tokens,
        must=defects.asks_too_many,
        ends=("RaisedValueError",),
        says=("Cannot satisfy max_token_len",),
    ),
)  # fmt: skip
"""verl's own, the most general first."""

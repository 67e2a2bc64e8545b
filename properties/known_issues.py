"""The known failures of torch's own FSDP1 and FSDP2, and of the engines that stand on them.

Torch's were seen on torch 2.13 with gloo, through the plain adapters; an engine that leaves torch's
wrapper as it is has them as well. What the words of an entry mean is said in
`properties.issues.issue`. The reference engine has none of them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from fsdp_engine.contract.case import Strategy
from properties.issues import programs, verl
from properties.issues import torch_defects as torch
from properties.issues.accelerate import ACCELERATE
from properties.issues.issue import KnownIssue, Predicate, fixed_issue, known_issue, under

__all__ = ["KNOWN_ISSUES", "KnownIssue", "fixed_issue", "known_issue"]

_PYTORCH = "https://github.com/pytorch/pytorch"
_SOURCE = f"{_PYTORCH}/blob/v2.13.0/torch/distributed/fsdp"
_GRADIENTS = ("gradient-matches-oracle",)
_ON_FSDP1 = ("torch_fsdp1", "accelerate")
_ON_FSDP2 = ("torch_fsdp2", "accelerate", "lightning")


def _both(first: Predicate, *others: Predicate) -> Predicate:
    return lambda case: first(case) and all(other(case) for other in others)


def _under(strategy: Strategy, issues: tuple[KnownIssue, ...]) -> tuple[KnownIssue, ...]:
    return tuple(
        replace(issue, hits=under(strategy, issue.hits), must=under(strategy, issue.must))
        for issue in issues
    )


FSDP1 = (
    KnownIssue(
        id="fsdp1-one-shard-never-averages",
        engines=_ON_FSDP1,
        reason="hybrid sharding with one shard turns into NO_SHARD over the shard axis, so "
        "gradients are divided by the number of ranks and never cross the replicas",
        reference=f"{_PYTORCH}/issues/154888",
        hits=torch.never_averages,
        must=_both(torch.never_averages, programs.is_alive),
        ends=("Failed",),
        must_in=_GRADIENTS,
    ),
    KnownIssue(
        id="fsdp1-no-shard-rounds-running-sum",
        engines=_ON_FSDP1,
        reason="NO_SHARD reduces the sum of the new and the already reduced gradient, so the sum "
        "is rounded to the reduce dtype at every micro-batch",
        reference=f"{_SOURCE}/_runtime_utils.py#L932",
        hits=torch.rounds_running_sum,
        must=torch.surely_rounds_running_sum,
        ends=("Failed",),
        must_in=_GRADIENTS,
    ),
    KnownIssue(
        id="fsdp1-clip-refuses-double",
        engines=_ON_FSDP1,
        reason="clip_grad_norm_ asks for norms in fp32, which torch refuses for fp64 gradients",
        reference=f"{_SOURCE}/fully_sharded_data_parallel.py#L2119",
        hits=torch.clips_in_double,
        must=torch.clips_in_double,
        ends=("RaisedRuntimeError",),
        says=("without narrowing to the specified dtype",),
    ),
    KnownIssue(
        id="fsdp1-norm-rounded-on-some-ranks",
        engines=_ON_FSDP1,
        reason="clip_grad_norm_ hands the norm back in the gradients' dtype, but in fp32 on a rank "
        "whose shard holds none of them",
        reference=f"{_SOURCE}/fully_sharded_data_parallel.py#L1207",
        hits=torch.rounds_norm_on_some_ranks,
        must=torch.surely_rounds_norm_on_some_ranks,
        ends=("Failed",),
        says=("as on rank 0",),
        properties=("norm-and-clip-match-oracle",),
    ),
    KnownIssue(
        id="fsdp1-no-shard-tied-and-frozen",
        engines=_ON_FSDP1,
        reason="with NO_SHARD a tied parameter of a wholly frozen unit is registered as a tensor "
        "that is no parameter, which the next forward asserts against",
        reference=f"{_SOURCE}/_flat_param.py#L2024",
        hits=partial(torch.ties_what_is_frozen, at_once=False),
        must=partial(torch.ties_what_is_frozen, at_once=True),
        ends=("RaisedAssertionError",),
        says=("as_params=",),
    ),
    KnownIssue(
        id="fsdp1-no-shard-exports-no-frozen-root",
        engines=_ON_FSDP1,
        reason="with NO_SHARD the parameters of a wholly frozen root stay registered as tensors "
        "behind a backward, so the state dict has no place for them",
        reference=f"{_SOURCE}/_state_dict_utils.py#L227",
        hits=partial(torch.exports_what_is_frozen, at_once=False),
        must=partial(torch.exports_what_is_frozen, at_once=True),
        ends=("RaisedAssertionError",),
        says=("param_name=",),
    ),
    KnownIssue(
        id="fsdp1-no-shard-tied-in-low-precision",
        engines=_ON_FSDP1,
        reason="with NO_SHARD every forward assigns a tied parameter its gradient once more, which "
        "torch refuses where no_sync left one in the compute dtype",
        reference=f"{_SOURCE}/_flat_param.py#L1949",
        hits=partial(torch.ties_in_low_precision, unknown=True),
        must=partial(torch.ties_in_low_precision, unknown=False),
        ends=("RaisedRuntimeError",),
        says=("grad_dtype",),
    ),
    KnownIssue(
        id="fsdp1-deferred-unit-not-in-the-last",
        engines=_ON_FSDP1,
        reason="the final callback asserts that every unit with a gradient was reduced in the last "
        "backward, which one that only earlier micro-batches used was not",
        reference=f"{_SOURCE}/_flat_param.py#L1715",
        hits=partial(torch.skips_unit_in_the_last, unknown=True),
        must=partial(torch.skips_unit_in_the_last, unknown=False),
        ends=("RaisedAssertionError",),
        says=("_saved_grad_shard",),
    ),
    KnownIssue(
        id="fsdp1-no-shard-unit-not-in-the-last",
        engines=_ON_FSDP1,
        reason="with NO_SHARD a unit that only earlier micro-batches used is not reduced at all: "
        "its gradient stays as no_sync left it, in the compute dtype",
        reference=f"{_SOURCE}/_runtime_utils.py#L932",
        hits=partial(torch.leaves_unit_unreduced, unknown=True),
        must=partial(torch.leaves_unit_unreduced, unknown=False),
        ends=("Failed",),
        must_in=_GRADIENTS,
    ),
    KnownIssue(
        id="fsdp1-steps-what-was-not-used",
        engines=_ON_FSDP1,
        reason="a parameter that no rank used has zeros for a gradient where its unit ran, so "
        "weight decay moves it and AdamW gives it state",
        reference=f"{_SOURCE}/_flat_param.py#L2595",
        hits=partial(torch.steps_without_use, unknown=True),
        must=_both(torch.shards, torch.surely_steps_without_use),
        ends=("Failed",),
        properties=("optimizer-step-matches-oracle", "unused-parameters-stay"),
        must_in=("unused-parameters-stay",),
    ),
    KnownIssue(
        id="fsdp1-interrupted-batch-stays",
        engines=_ON_FSDP1,
        reason="an exception in a micro-batch leaves training states, gathered parameters and "
        "saved gradients as they were, and nothing public puts them back",
        reference=f"{_SOURCE}/_runtime_utils.py#L701",
        hits=programs.may_be_interrupted,
        must=_both(torch.shards, programs.interrupts_forward),
        ends=("Failed", "RaisedRuntimeError", "RaisedValueError", "RaisedAssertionError"),
    ),
    KnownIssue(
        id="fsdp1-unused-stays-gathered",
        engines=_ON_FSDP1,
        reason="under ZeRO-2 a forward without backward leaves everything gathered, also a unit "
        "that the next micro-batches do not use",
        reference=f"{_SOURCE}/_runtime_utils.py#L496",
        hits=_both(torch.shards, torch.keeps_unused_gathered),
        must=_both(torch.shards, torch.surely_keeps_unused_gathered),
        ends=("Failed",),
        says=("resident in full", "gathered parameters"),
        properties=("retained-bytes-match", "residency-matches-strategy"),
        must_in=("retained-bytes-match",),
    ),
    KnownIssue(
        id="fsdp1-restore-while-gathered",
        engines=_ON_FSDP1,
        reason="the root stays gathered after a forward without backward, so what is written to "
        "its shards in place is not seen by the next forward",
        reference=f"{_PYTORCH}/issues/117421",
        hits=_both(torch.shards, programs.restores_what_is_gathered),
        must=_both(torch.shards, programs.surely_restores),
        ends=("Failed",),
        must_in=_GRADIENTS,
    ),
)

FSDP2 = (
    KnownIssue(
        id="fsdp2-fresh-gradient-in-the-last",
        engines=_ON_FSDP2,
        reason="a parameter first used in the last micro-batch has a gradient in the compute dtype "
        "beside accumulated ones in the reduce dtype",
        reference=f"{_PYTORCH}/issues/196996",
        hits=partial(torch.meets_fresh_gradient, unknown=True),
        must=_both(partial(torch.meets_fresh_gradient, unknown=False), programs.never_frozen),
        ends=("RaisedAssertionError",),
        says=("uniform gradient dtype",),
    ),
    KnownIssue(
        id="fsdp2-accumulates-what-never-ran",
        engines=_ON_FSDP2,
        reason="a unit that was never gathered has no unsharded parameter, which the accumulation "
        "in the reduce dtype reads all the same",
        reference=f"{_PYTORCH}/pull/194058",
        hits=partial(torch.accumulates_what_never_ran, unknown=True),
        must=partial(torch.accumulates_what_never_ran, unknown=False),
        ends=("RaisedAttributeError",),
        says=("_unsharded_param",),
    ),
    KnownIssue(
        id="fsdp2-sizes-differ-between-ranks",
        engines=_ON_FSDP2,
        reason="a unit reduces the parameters that have a gradient on this rank; where others have "
        "more or fewer, sizes do not fit and gloo ends the process",
        reference=f"{_PYTORCH}/issues/158719",
        hits=partial(torch.reduces_other_sizes, unknown=True),
        must=_both(partial(torch.reduces_other_sizes, unknown=False), programs.never_frozen),
        ends=(
            "Died",
            "Hung",
            "RaisedRuntimeError",
            "RaisedAssertionError",
            "RaisedDistBackendError",
        ),
    ),
    KnownIssue(
        id="fsdp2-mixes-what-ranks-use",
        engines=_ON_FSDP2,
        reason="a unit reduces the parameters that have a gradient on this rank; where others have "
        "others of the same size, these are added up silently; the norm behind it has a term per "
        "gradient, so where some ranks have more gloo waits or ends the process",
        reference=f"{_PYTORCH}/issues/158719",
        hits=torch.reduces_other_parameters,
        must=_both(torch.reduces_other_parameters, programs.never_frozen, programs.is_alive),
        ends=("Failed", "Died", "Hung", "RaisedRuntimeError"),
        must_in=_GRADIENTS,
    ),
    KnownIssue(
        id="fsdp2-unfrozen-after-first-forward",
        engines=_ON_FSDP2,
        reason="a unit takes its dtypes from the parameters that train at the first forward, of "
        "which there are none: its gradient is neither reduced in the reduce dtype nor cast back",
        reference=f"{_PYTORCH}/issues/186998",
        hits=partial(torch.unfreezes_mixed, must_raise=False),
        must=partial(torch.unfreezes_mixed, must_raise=True),
        ends=("Failed", "RaisedRuntimeError"),
        says=("grad_dtype", "gradient"),
    ),
    KnownIssue(
        id="fsdp2-frozen-or-unfrozen-while-gathered",
        engines=_ON_FSDP2,
        reason="what stays gathered after a forward without backward keeps the requires_grad of "
        "then, so the next micro-batch does not see what was frozen or unfrozen since",
        reference=f"{_SOURCE}/_fully_shard/_fsdp_param_group.py#L372",
        hits=partial(programs.toggles_what_stays, surely=False),
        must=_both(partial(programs.toggles_what_stays, surely=True), programs.is_alive),
        ends=("Failed",),
        must_in=_GRADIENTS,
    ),
    KnownIssue(
        id="fsdp2-interrupted-batch-stays",
        engines=_ON_FSDP2,
        reason="gradients that wait for their reduction survive zero_grad and reset_iter_state "
        "and are added to the next batch's",
        reference=f"{_SOURCE}/_fully_shard/_fully_shard.py#L376",
        hits=programs.may_be_interrupted,
        must=_both(programs.leaves_accumulators, programs.is_alive),
        ends=("Failed", "RaisedRuntimeError", "RaisedAssertionError"),
        must_in=_GRADIENTS,
    ),
    KnownIssue(
        id="fsdp2-unused-stays-gathered",
        engines=_ON_FSDP2,
        reason="under ZeRO-2 a forward without backward leaves everything gathered, also a unit "
        "that the next micro-batches do not use",
        reference=f"{_SOURCE}/_fully_shard/_fsdp_param_group.py#L500",
        hits=torch.keeps_unused_gathered,
        must=torch.surely_keeps_unused_gathered,
        ends=("Failed",),
        says=("resident in full", "gathered parameters"),
        properties=("retained-bytes-match", "residency-matches-strategy"),
        must_in=("retained-bytes-match",),
    ),
    KnownIssue(
        id="fsdp2-restore-while-gathered",
        engines=_ON_FSDP2,
        reason="the root stays gathered after a forward without backward, so what is written to "
        "its shards in place is not seen by the next forward",
        reference=f"{_PYTORCH}/issues/144289",
        hits=programs.restores_what_is_gathered,
        must=programs.surely_restores,
        ends=("Failed",),
        must_in=_GRADIENTS,
    ),
)

_GATHERED = tuple(
    KnownIssue(
        id=f"fsdp{version}-gathered-after-inference",
        engines=(f"torch_fsdp{version}",),
        reason="after a forward without backward the root stays gathered, under ZeRO-2 everything, "
        "and so stays in memory until the next backward",
        reference=f"{_SOURCE}/{place}",
        hits=programs.infers,
        must=programs.trains_after_inference,
        ends=("Failed",),
        says=("bytes on the device",),
        properties=(
            "device-memory-matches-oracle",
            "device-peak-matches-oracle",
            "tensors-rest-where-asked",
        ),
        must_in=("device-memory-matches-oracle",),
    )
    for version, place in (
        (1, "_runtime_utils.py#L496"),
        (2, "_fully_shard/_fsdp_param_group.py#L500"),
    )
)

ON_DEVICE = (
    *_GATHERED,
    KnownIssue(
        id="fsdp1-zeroes-gradients-without-order",
        engines=("torch_fsdp1",),
        reason="before it gathers, FSDP1 zeroes what a flat gradient has of parameters without one "
        "of their own, on a stream for which the backward, which adds to it, does not wait",
        reference=f"{_SOURCE}/_flat_param.py#L2340",
        hits=partial(torch.zeroes_unordered, unknown=True),
        must=partial(torch.zeroes_unordered, unknown=False),
        ends=("Failed",),
        says=("add_ writes on stream",),
        properties=("device-order-is-kept",),
    ),
    KnownIssue(
        id="fsdp1-gradients-outlive-zero-grad",
        engines=("torch_fsdp1",),
        reason="zero_grad takes the parameters' gradients away, which are views: the flat gradient "
        "stays in memory until the next forward",
        reference=f"{_SOURCE}/_flat_param.py#L2447",
        hits=partial(programs.trains_again, at_once=False),
        must=partial(programs.trains_again, at_once=True),
        ends=("Failed",),
        says=("bytes on the device before", "bytes on the device at most in forward"),
        properties=("device-memory-matches-oracle", "device-peak-matches-oracle"),
        must_in=("device-memory-matches-oracle",),
    ),
)

VERL = verl.OWN + verl.inherited(FSDP1 + FSDP2 + ON_DEVICE)

KNOWN_ISSUES: tuple[KnownIssue, ...] = (
    *_under("fsdp1", FSDP1),
    *_under("fsdp2", FSDP2),
    *ON_DEVICE,
    *VERL,
    *ACCELERATE,
)

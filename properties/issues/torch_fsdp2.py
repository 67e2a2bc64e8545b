"""What torch's FSDP2 is known to do wrong, seen on torch 2.13 through the plain adapter.

An engine that leaves the wrapper as it is has the `SHARED` ones as well. Those of `ON_DEVICE` are
about what a device holds and in which order.
"""

from __future__ import annotations

from functools import partial

from properties.issues import programs
from properties.issues import torch_defects as defects
from properties.issues.issue import KnownIssue, all_of, all_under

_PYTORCH = "https://github.com/pytorch/pytorch"
_SOURCE = f"{_PYTORCH}/blob/v2.13.0/torch/distributed/fsdp"
_GRADIENTS = ("gradient-matches-oracle",)
_ENGINES = ("torch_fsdp2", "accelerate", "lightning")

SHARED = all_under(
    "fsdp2",
    KnownIssue(
        id="fsdp2-fresh-gradient-in-the-last",
        engines=_ENGINES,
        reason="a parameter first used in the last micro-batch has a gradient in the compute dtype "
        "beside accumulated ones in the reduce dtype",
        reference=f"{_PYTORCH}/issues/196996",
        hits=partial(defects.meets_fresh_gradient, unknown=True),
        must=all_of(partial(defects.meets_fresh_gradient, unknown=False), programs.never_frozen),
        ends=("RaisedAssertionError",),
        says=("uniform gradient dtype",),
    ),
    KnownIssue(
        id="fsdp2-accumulates-what-never-ran",
        engines=_ENGINES,
        reason="a unit that was never gathered has no unsharded parameter, which the accumulation "
        "in the reduce dtype reads all the same",
        reference=f"{_PYTORCH}/pull/194058",
        hits=partial(defects.accumulates_what_never_ran, unknown=True),
        must=partial(defects.accumulates_what_never_ran, unknown=False),
        ends=("RaisedAttributeError",),
        says=("_unsharded_param",),
    ),
    KnownIssue(
        id="fsdp2-sizes-differ-between-ranks",
        engines=_ENGINES,
        reason="a unit reduces the parameters that have a gradient on this rank; where others have "
        "more or fewer, sizes do not fit and gloo ends the process",
        reference=f"{_PYTORCH}/issues/158719",
        hits=partial(defects.reduces_other_sizes, unknown=True),
        must=all_of(partial(defects.reduces_other_sizes, unknown=False), programs.never_frozen),
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
        engines=_ENGINES,
        reason="a unit reduces the parameters that have a gradient on this rank; where others have "
        "others of the same size, these are added up silently; the norm behind it has a term per "
        "gradient, so where some ranks have more gloo waits or ends the process",
        reference=f"{_PYTORCH}/issues/158719",
        hits=defects.reduces_other_parameters,
        must=all_of(defects.reduces_other_parameters, programs.never_frozen, programs.is_alive),
        ends=("Failed", "Died", "Hung", "RaisedRuntimeError"),
        must_in=_GRADIENTS,
    ),
    KnownIssue(
        id="fsdp2-unfrozen-after-first-forward",
        engines=_ENGINES,
        reason="a unit takes its dtypes from the parameters that train at the first forward, of "
        "which there are none: its gradient is neither reduced in the reduce dtype nor cast back",
        reference=f"{_PYTORCH}/issues/186998",
        hits=partial(defects.unfreezes_mixed, must_raise=False),
        must=partial(defects.unfreezes_mixed, must_raise=True),
        ends=("Failed", "RaisedRuntimeError"),
        says=("grad_dtype", "gradient"),
    ),
    KnownIssue(
        id="fsdp2-frozen-or-unfrozen-while-gathered",
        engines=_ENGINES,
        reason="what stays gathered after a forward without backward keeps the requires_grad of "
        "then, so the next micro-batch does not see what was frozen or unfrozen since",
        reference=f"{_SOURCE}/_fully_shard/_fsdp_param_group.py#L372",
        hits=partial(programs.toggles_what_stays, surely=False),
        must=all_of(partial(programs.toggles_what_stays, surely=True), programs.is_alive),
        ends=("Failed",),
        must_in=_GRADIENTS,
    ),
    KnownIssue(
        id="fsdp2-interrupted-batch-stays",
        engines=_ENGINES,
        reason="gradients that wait for their reduction survive zero_grad and reset_iter_state "
        "and are added to the next batch's",
        reference=f"{_SOURCE}/_fully_shard/_fully_shard.py#L376",
        hits=programs.may_be_interrupted,
        must=all_of(programs.leaves_accumulators, programs.is_alive),
        ends=("Failed", "RaisedRuntimeError", "RaisedAssertionError"),
        must_in=_GRADIENTS,
    ),
    KnownIssue(
        id="fsdp2-unused-stays-gathered",
        engines=_ENGINES,
        reason="under ZeRO-2 a forward without backward leaves everything gathered, also a unit "
        "that the next micro-batches do not use",
        reference=f"{_SOURCE}/_fully_shard/_fsdp_param_group.py#L500",
        hits=defects.keeps_unused_gathered,
        must=defects.surely_keeps_unused_gathered,
        ends=("Failed",),
        says=("resident in full", "gathered parameters"),
        properties=("retained-bytes-match", "residency-matches-strategy"),
        must_in=("retained-bytes-match",),
    ),
    KnownIssue(
        id="fsdp2-restore-while-gathered",
        engines=_ENGINES,
        reason="the root stays gathered after a forward without backward, so what is written to "
        "its shards in place is not seen by the next forward",
        reference=f"{_PYTORCH}/issues/144289",
        hits=programs.restores_what_is_gathered,
        must=programs.surely_restores,
        ends=("Failed",),
        must_in=_GRADIENTS,
    ),
)

ON_DEVICE = all_under(
    "fsdp2",
    KnownIssue(
        id="fsdp2-gathered-after-inference",
        engines=("torch_fsdp2",),
        reason="after a forward without backward the root stays gathered, under ZeRO-2 everything, "
        "and so stays in memory until the next backward",
        reference=f"{_SOURCE}/_fully_shard/_fsdp_param_group.py#L500",
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
    ),
)

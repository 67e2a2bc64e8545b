"""What torch's FSDP1 is known to do wrong, seen on torch 2.13 through the plain adapter.

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
_ENGINES = ("torch_fsdp1", "accelerate")

SHARED = all_under(
    "fsdp1",
    KnownIssue(
        id="fsdp1-one-shard-never-averages",
        engines=_ENGINES,
        reason="hybrid sharding with one shard turns into NO_SHARD over the shard axis, so "
        "gradients are divided by the number of ranks and never cross the replicas",
        reference=f"{_PYTORCH}/issues/154888",
        hits=defects.never_averages,
        must=all_of(defects.never_averages, programs.is_alive),
        ends=("Failed",),
        must_in=_GRADIENTS,
    ),
    KnownIssue(
        id="fsdp1-no-shard-rounds-running-sum",
        engines=_ENGINES,
        reason="NO_SHARD reduces the sum of the new and the already reduced gradient, so the sum "
        "is rounded to the reduce dtype at every micro-batch",
        reference=f"{_SOURCE}/_runtime_utils.py#L932",
        hits=defects.rounds_running_sum,
        must=defects.surely_rounds_running_sum,
        ends=("Failed",),
        must_in=_GRADIENTS,
    ),
    KnownIssue(
        id="fsdp1-clip-refuses-double",
        engines=_ENGINES,
        reason="clip_grad_norm_ asks for norms in fp32, which torch refuses for fp64 gradients",
        reference=f"{_SOURCE}/fully_sharded_data_parallel.py#L2119",
        hits=defects.clips_in_double,
        must=defects.clips_in_double,
        ends=("RaisedRuntimeError",),
        says=("without narrowing to the specified dtype",),
    ),
    KnownIssue(
        id="fsdp1-norm-rounded-on-some-ranks",
        engines=_ENGINES,
        reason="clip_grad_norm_ hands the norm back in the gradients' dtype, but in fp32 on a rank "
        "whose shard holds none of them",
        reference=f"{_SOURCE}/fully_sharded_data_parallel.py#L1207",
        hits=defects.rounds_norm_on_some_ranks,
        must=defects.surely_rounds_norm_on_some_ranks,
        ends=("Failed",),
        says=("as on rank 0",),
        properties=("norm-and-clip-match-oracle",),
    ),
    KnownIssue(
        id="fsdp1-no-shard-tied-and-frozen",
        engines=_ENGINES,
        reason="with NO_SHARD a tied parameter of a wholly frozen unit is registered as a tensor "
        "that is no parameter, which the next forward asserts against",
        reference=f"{_SOURCE}/_flat_param.py#L2024",
        hits=partial(defects.ties_what_is_frozen, at_once=False),
        must=partial(defects.ties_what_is_frozen, at_once=True),
        ends=("RaisedAssertionError",),
        says=("as_params=",),
    ),
    KnownIssue(
        id="fsdp1-no-shard-exports-no-frozen-root",
        engines=_ENGINES,
        reason="with NO_SHARD the parameters of a wholly frozen root stay registered as tensors "
        "behind a backward, so the state dict has no place for them",
        reference=f"{_SOURCE}/_state_dict_utils.py#L227",
        hits=partial(defects.exports_what_is_frozen, at_once=False),
        must=partial(defects.exports_what_is_frozen, at_once=True),
        ends=("RaisedAssertionError",),
        says=("param_name=",),
    ),
    KnownIssue(
        id="fsdp1-no-shard-tied-in-low-precision",
        engines=_ENGINES,
        reason="with NO_SHARD every forward assigns a tied parameter its gradient once more, which "
        "torch refuses where no_sync left one in the compute dtype",
        reference=f"{_SOURCE}/_flat_param.py#L1949",
        hits=partial(defects.ties_in_low_precision, unknown=True),
        must=partial(defects.ties_in_low_precision, unknown=False),
        ends=("RaisedRuntimeError",),
        says=("grad_dtype",),
    ),
    KnownIssue(
        id="fsdp1-deferred-unit-not-in-the-last",
        engines=_ENGINES,
        reason="the final callback asserts that every unit with a gradient was reduced in the last "
        "backward, which one that only earlier micro-batches used was not",
        reference=f"{_SOURCE}/_flat_param.py#L1715",
        hits=partial(defects.skips_unit_in_the_last, unknown=True),
        must=partial(defects.skips_unit_in_the_last, unknown=False),
        ends=("RaisedAssertionError",),
        says=("_saved_grad_shard",),
    ),
    KnownIssue(
        id="fsdp1-no-shard-unit-not-in-the-last",
        engines=_ENGINES,
        reason="with NO_SHARD a unit that only earlier micro-batches used is not reduced at all: "
        "its gradient stays as no_sync left it, in the compute dtype",
        reference=f"{_SOURCE}/_runtime_utils.py#L932",
        hits=partial(defects.leaves_unit_unreduced, unknown=True),
        must=partial(defects.leaves_unit_unreduced, unknown=False),
        ends=("Failed",),
        must_in=_GRADIENTS,
    ),
    KnownIssue(
        id="fsdp1-steps-what-was-not-used",
        engines=_ENGINES,
        reason="a parameter that no rank used has zeros for a gradient where its unit ran, so "
        "weight decay moves it and AdamW gives it state",
        reference=f"{_SOURCE}/_flat_param.py#L2595",
        hits=partial(defects.steps_without_use, unknown=True),
        must=all_of(defects.shards, defects.surely_steps_without_use),
        ends=("Failed",),
        properties=("optimizer-step-matches-oracle", "unused-parameters-stay"),
        must_in=("unused-parameters-stay",),
    ),
    KnownIssue(
        id="fsdp1-interrupted-batch-stays",
        engines=_ENGINES,
        reason="an exception in a micro-batch leaves training states, gathered parameters and "
        "saved gradients as they were, and nothing public puts them back",
        reference=f"{_SOURCE}/_runtime_utils.py#L701",
        hits=programs.may_be_interrupted,
        must=all_of(defects.shards, programs.interrupts_forward),
        ends=("Failed", "RaisedRuntimeError", "RaisedValueError", "RaisedAssertionError"),
    ),
    KnownIssue(
        id="fsdp1-unused-stays-gathered",
        engines=_ENGINES,
        reason="under ZeRO-2 a forward without backward leaves everything gathered, also a unit "
        "that the next micro-batches do not use",
        reference=f"{_SOURCE}/_runtime_utils.py#L496",
        hits=all_of(defects.shards, defects.keeps_unused_gathered),
        must=all_of(defects.shards, defects.surely_keeps_unused_gathered),
        ends=("Failed",),
        says=("resident in full", "gathered parameters"),
        properties=("retained-bytes-match", "residency-matches-strategy"),
        must_in=("retained-bytes-match",),
    ),
    KnownIssue(
        id="fsdp1-restore-while-gathered",
        engines=_ENGINES,
        reason="the root stays gathered after a forward without backward, so what is written to "
        "its shards in place is not seen by the next forward",
        reference=f"{_PYTORCH}/issues/117421",
        hits=all_of(defects.shards, programs.restores_what_is_gathered),
        must=all_of(defects.shards, programs.surely_restores),
        ends=("Failed",),
        must_in=_GRADIENTS,
    ),
)

ON_DEVICE = all_under(
    "fsdp1",
    KnownIssue(
        id="fsdp1-gathered-after-inference",
        engines=("torch_fsdp1",),
        reason="after a forward without backward the root stays gathered, under ZeRO-2 everything, "
        "and so stays in memory until the next backward",
        reference=f"{_SOURCE}/_runtime_utils.py#L496",
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
    KnownIssue(
        id="fsdp1-zeroes-gradients-without-order",
        engines=("torch_fsdp1",),
        reason="before it gathers, FSDP1 zeroes what a flat gradient has of parameters without one "
        "of their own, on a stream for which the backward, which adds to it, does not wait",
        reference=f"{_SOURCE}/_flat_param.py#L2340",
        hits=partial(defects.zeroes_unordered, unknown=True),
        must=partial(defects.zeroes_unordered, unknown=False),
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

"""Faults in checkpoints."""

from __future__ import annotations

from functools import partial

from tests.faults.fault import Fault, fault

RESUME = "resume-equals-uninterrupted"
RESHARDED = "resharded-resume-goes-on"
SAVE = "save-changes-nothing"
REFUSED = "damaged-checkpoint-is-refused"

_checkpoint = partial(fault, "checkpoint")

IN_CHECKPOINTS: tuple[Fault, ...] = (
    _checkpoint("checkpoint:StepCountersLost", "textbook", RESUME),
    _checkpoint("checkpoint:OptimizerNotLoaded", "ISEEKYAN/Megatron-LM#104", RESUME),
    _checkpoint("checkpoint:StateInWrongOrder", "deepspeedai/DeepSpeed#5105", RESUME),
    _checkpoint("checkpoint:MomentsSwapped", "deepspeedai/DeepSpeed#5105", RESHARDED),
    _checkpoint("checkpoint:ScheduleNotLoaded", "RLinf/RLinf#1359", RESUME, RESHARDED),
    _checkpoint("checkpoint:RateNotLoaded", "RLinf/RLinf#1359", RESUME),
    _checkpoint(
        "checkpoint:FirstRanksShardForAll", "huggingface/accelerate#4206", RESUME, RESHARDED
    ),
    _checkpoint("checkpoint:ShardsTakenForEven", "pytorch/torchtitan#4593", RESUME, mesh="line3"),
    _checkpoint("checkpoint:SavedInBf16", "pytorch/pytorch#104770", RESUME),
    _checkpoint("checkpoint:RandomOfFirstRank", "radixark/miles#3187", RESUME),
    _checkpoint("checkpoint:RandomNotLoaded", "radixark/miles#3187", RESUME),
    _checkpoint("checkpoint:OnlyCheckpointRemoved", "verl-project/verl#4873", RESUME),
    _checkpoint("checkpoint:OldestLoaded", "verl-project/verl#7117", RESUME),
    _checkpoint("checkpoint:NewOptimizerStaysEmpty", "verl-project/verl#7283", RESUME, RESHARDED),
    _checkpoint(
        "checkpoint:OtherReplicasNotLoaded",
        "huggingface/accelerate#4206",
        RESUME,
        strategy="fsdp2",
        mesh="grid column",
    ),
    _checkpoint(
        "checkpoint:TiedWeightNotLoaded", "deepspeedai/DeepSpeed#1896", RESUME, kind="tied"
    ),
    _checkpoint("checkpoint:BytesUnchecked", "textbook", REFUSED),
    _checkpoint("checkpoint:CheckedAfterLoading", "textbook", REFUSED),
    _checkpoint("checkpoint:MissingFilesTakenForEmpty", "bghira/SimpleTuner#2986", REFUSED),
    _checkpoint("checkpoint:SaveLeavesEvalMode", "RLinf/RLinf#1033", SAVE),
    _checkpoint("checkpoint:SaveAdvancesSchedule", "textbook", SAVE),
)

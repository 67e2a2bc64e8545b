"""Faults in what follows a gradient, and in what happens between batches."""

from __future__ import annotations

from functools import partial

from tests.faults.fault import Fault, fault

NORM = "norm-and-clip-match-oracle"
FINITE = "non-finite-step-changes-nothing"
OPTIMIZER = "optimizer-step-matches-oracle"
RATE = "learning-rate-matches-schedule"
INTERRUPTED = "interrupted-batch-changes-nothing"
QUIET = "inference-changes-nothing"
INFER = "infer-matches-oracle"
METRICS = "metrics-match-oracle"
FREEZING = "freezing-matches-oracle"
UNUSED = "unused-parameters-stay"
RESTORE = "restore-takes-effect"

_OPTIONAL = "optional_parameter optional_unit"

_norm = partial(fault, "norm")
_clip = partial(fault, "clip")
_finite = partial(fault, "non-finite")
_optimizer = partial(fault, "optimizer")
_schedule = partial(fault, "schedule")
_atomicity = partial(fault, "atomicity")
_inference = partial(fault, "inference")
_metrics = partial(fault, "metrics")
_freezing = partial(fault, "freezing")
_unused = partial(fault, "unused")
_restore = partial(fault, "restore")

IN_STEPS: tuple[Fault, ...] = (
    # the gradient norm
    _norm("norm:NormOfOwnShard", "RLinf/RLinf#1558", NORM),
    _norm("norm:OwnNormReported", "radixark/miles_diffusion#35", NORM),
    _norm("norm:FirstRankAlone", "NVIDIA/Megatron-LM#7452", NORM),
    _norm("norm:ReplicasCountedTwice", "NVIDIA/Megatron-LM#6489", NORM, mesh="grid column"),
    _norm("norm:NormOverReplicaAxis", "RLinf/RLinf#1558", NORM, mesh="grid column"),
    _norm("norm:TiedWeightTwice", "NVIDIA/Megatron-LM#7227", NORM, kind="tied"),
    _norm("norm:NormAfterClipping", "deepspeedai/DeepSpeed#7302", NORM),
    _norm("norm:NormOfStepBefore", "deepspeedai/DeepSpeed#7302", NORM),
    # clipping
    _clip("stepping:ClippingFindsNothing", "areal-project/AReaL#335 (item 3)", NORM),
    _clip("stepping:ClippedAfterStep", "simchowitzlabpublic/nano-world-model#22", OPTIMIZER),
    _clip(
        "stepping:ClippedPerMicroBatch",
        "simchowitzlabpublic/nano-world-model#22",
        "gradient-matches-oracle",
    ),
    # a gradient that is not finite
    _finite("stepping:StepTakenAnyway", "Lightning-AI/pytorch-lightning#21928", FINITE),
    _finite("stepping:OverflowFlagPerRank", "pytorch/pytorch#136009", FINITE),
    _finite("stepping:BadGradientsKept", "textbook", FINITE),
    _finite("stepping:SkippedStepDecays", "textbook", FINITE),
    # the optimizer
    _optimizer(
        "optimizer:BuiltBeforeWrapping",
        "huggingface/accelerate#3256",
        OPTIMIZER,
        strategy="fsdp2",
    ),
    _optimizer("optimizer:DefaultsOnOtherRanks", "pytorch/pytorch#140900", OPTIMIZER),
    _optimizer("optimizer:SecondGroupHasDefaults", "pytorch/pytorch#143828", OPTIMIZER),
    _optimizer("optimizer:MomentsInBf16", "areal-project/AReaL#1292", OPTIMIZER),
    _optimizer("optimizer:EverySecondUpdateLost", "NVIDIA/Megatron-LM#6336", OPTIMIZER),
    _optimizer("optimizer:DecayCoupled", "textbook", OPTIMIZER),
    _optimizer("optimizer:EpsilonTooLarge", "sensitivity", OPTIMIZER),
    _optimizer("optimizer:StepsCountedTwice", "textbook", OPTIMIZER),
    # the learning rate
    _schedule("schedule:ScheduleOfDiscardedOptimizer", "RLinf/RLinf#1359", OPTIMIZER),
    _schedule("schedule:WarmupIgnored", "textbook", RATE),
    _schedule("schedule:ScheduleOneAhead", "textbook", RATE),
    _schedule("schedule:ScheduleWaitsAfterSkip", "textbook", FINITE),
    _schedule("schedule:SchedulePerMicroBatch", "deepspeedai/DeepSpeed#8443", RATE),
    # an exception in the middle of a batch
    _atomicity(
        "atomicity:AccumulatorsSurvive",
        "mosaicml/composer#2117",
        INTERRUPTED,
        strategy="fsdp2",
        sync="deferred",
    ),
    _atomicity("atomicity:NotResetAfterError", "mosaicml/composer#3030", INTERRUPTED),
    _atomicity(
        "atomicity:SyncLeftOff",
        "huggingface/transformers#34645",
        INTERRUPTED,
        strategy="fsdp2",
        sync="deferred",
    ),
    _atomicity("atomicity:InterruptedBatchCounted", "textbook", INTERRUPTED),
    # inference between steps
    _inference("inference:EvalModeStays", "RLinf/RLinf#1033", QUIET),
    _inference(
        "inference:BuffersDoubled", "PrimeIntellect-ai/prime-rl#2953", QUIET, kind="buffers"
    ),
    _inference("inference:InferenceOnInitialWeights", "NVIDIA/Megatron-LM#6336", INFER),
    _inference("inference:InferenceInBf16", "verl-project/verl#6150", INFER, dtypes="fp32 fp64"),
    _inference("inference:InferenceMasked", "mosaicml/composer#3677", INFER),
    _inference("inference:InferenceShifted", "textbook", INFER),
    # what is reported
    _metrics("metrics:OwnLossReported", "radixark/miles_diffusion#35", METRICS),
    _metrics("metrics:LossSummed", "radixark/miles#3231", METRICS),
    _metrics("metrics:LastMicroBatchReported", "NVIDIA/Megatron-LM#7186", METRICS),
    _metrics("metrics:LossOverMicroBatches", "verl-project/verl#2919", METRICS),
    _metrics("metrics:AllTokensReported", "mosaicml/composer#3677", METRICS),
    _metrics("metrics:OwnTokensReported", "huggingface/transformers#34242", METRICS),
    # frozen, unfrozen and unused parameters
    _freezing("freezing:AbsentGradientsAreZero", "Lightning-AI/litgpt#1417", FREEZING),
    _freezing("freezing:FreezeIgnored", "pytorch/pytorch#149205", FREEZING),
    _freezing("freezing:FrozenKeepsGradient", "pytorch/xla#5484", FREEZING, strategy="fsdp2"),
    _freezing("freezing:UnfrozenStaysOut", "mosaicml/composer#3822", FREEZING, kind="frozen"),
    _freezing(
        "freezing:UnfrozenLosesReduceDtype",
        "pytorch/pytorch#186998",
        FREEZING,
        dtypes="fp32/bf16/fp32 bf16/bf16/fp32",
    ),
    _unused("freezing:UnusedTakenAsUsed", "pytorch/pytorch#174862", UNUSED, kind=_OPTIONAL),
    _unused(
        "freezing:UsageOfOwnRank",
        "pytorch/pytorch#158719",
        "gradient-matches-oracle",
        kind=_OPTIONAL,
    ),
    _unused("atomicity:UsageKept", "pytorch/pytorch#158719", UNUSED, kind=_OPTIONAL),
    # weights that are written back
    _restore("freezing:RestoreIgnored", "pytorch/pytorch#117421", RESTORE),
    _restore("freezing:RestoredByPosition", "huggingface/accelerate#3982", RESTORE),
)

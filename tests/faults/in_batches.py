"""Faults in how a batch becomes a gradient: loss, accumulation, reduction, start, planning."""

from __future__ import annotations

from functools import partial

from tests.faults.fault import Fault, fault

GRADIENT = "gradient-matches-oracle"
EXACT = "gradient-is-exact"
SPLIT = "split-invariance"
REPLICAS = "replicas-agree"
DEFERRED = "deferred-equals-eager"
PARTITION = "micro-batches-partition"

_BF16 = "fp32/bf16/fp32 fp32/bf16/bf16 bf16/bf16/fp32"

_loss = partial(fault, "loss")
_sync = partial(fault, "sync")
_reduction = partial(fault, "reduction")
_dtype = partial(fault, "dtype")
_start = partial(fault, "start")
_planner = partial(fault, "planner")

IN_BATCHES: tuple[Fault, ...] = (
    # loss weights
    _loss("loss:SampleShareWeights", "verl-project/verl#5625", GRADIENT, EXACT, SPLIT),
    _loss("loss:NoRankFactor", "meta-pytorch/torchtune#2172", GRADIENT, EXACT, SPLIT),
    _loss("loss:NoRankFactorInOneMode", "verl-project/verl#5366", GRADIENT),
    _loss("loss:LocalTokenCount", "PrimeIntellect-ai/prime-rl#2358", GRADIENT, SPLIT),
    _loss("loss:PaddingCounted", "PrimeIntellect-ai/prime-rl#674", GRADIENT),
    _loss("loss:MeanOfMeans", "verl-project/verl#2919", GRADIENT, SPLIT),
    _loss("loss:RescaledByShards", "meta-pytorch/torchtune#2687", GRADIENT, mesh="grid column"),
    # when gradients are reduced
    _sync(
        "sync:DeferralIgnored",
        "NVIDIA/cosmos-framework#162",
        DEFERRED,
        "every-unit-is-reduced",
        sync="deferred",
    ),
    _sync("sync:LastSyncSkipped", "karpathy/build-nanogpt#30", GRADIENT, DEFERRED, sync="deferred"),
    _sync("sync:LastMicroBatchOnly", "NVIDIA/Megatron-LM#7186", GRADIENT, DEFERRED),
    _sync("sync:AccumulatedTwice", "hpcaitech/ColossalAI#247", GRADIENT, EXACT, sync="eager"),
    _sync("sync:NoAccumulationOnOneRank", "ServiceNow/Fast-LLM#550", GRADIENT, mesh="single"),
    _sync(
        "sync:ZeroTwoForgets",
        "allenai/open-instruct#1498",
        GRADIENT,
        EXACT,
        reshard="zero2",
        sync="eager",
    ),
    _sync(
        "sync:GatheredParametersKept",
        "verl-project/verl#7458",
        "retained-bytes-match",
        strategy="fsdp2",
        sync="deferred",
    ),
    _sync("sync:LegacyMeansEager", "verl-project/verl#7458", DEFERRED, sync="deferred"),
    _sync(
        "sync:GatheredTwice",
        "pytorch/pytorch#111354",
        "collectives-match-schedule",
        strategy="fsdp2",
    ),
    _sync("sync:CollectivesInRankOrder", "radixark/miles#3194", "collectives-agree-in-groups"),
    # over which ranks
    _reduction(
        "reduction:OneRankShardGroup",
        "pytorch/pytorch#154888",
        GRADIENT,
        REPLICAS,
        strategy="fsdp1",
        mesh="column",
    ),
    _reduction(
        "reduction:ReplicasAveragedTwice",
        "pytorch/torchtitan#2318",
        GRADIENT,
        EXACT,
        mesh="grid column",
    ),
    _reduction(
        "reduction:ReplicaAxisDropped",
        "NVIDIA-NeMo/Automodel#3135",
        REPLICAS,
        GRADIENT,
        strategy="fsdp2",
        mesh="grid column",
    ),
    _reduction("reduction:DividedByShardSize", "meta-pytorch/torchcomms#287", GRADIENT),
    _reduction("reduction:ParameterNotReduced", "pytorch/pytorch#98281", GRADIENT),
    _reduction("reduction:SmallScaleError", "sensitivity", GRADIENT, EXACT),
    _reduction(
        "parameters:NextShardKept",
        "deepspeedai/DeepSpeed#966",
        GRADIENT,
        EXACT,
        strategy="fsdp2",
        reshard="zero2",
    ),
    _reduction(
        "parameters:PaddingRowOnEveryRank",
        "pytorch/torchtitan#4637",
        GRADIENT,
        strategy="fsdp2",
        kind="embedding tied llama qwen2 mixtral",
    ),
    _reduction(
        "parameters:AdapterOnFirstRankOnly",
        "axolotl-ai-cloud/axolotl#3772",
        GRADIENT,
        adapter="lora",
    ),
    # in which dtype
    _dtype(
        "sync:AccumulatedInBf16",
        "ISEEKYAN/Megatron-LM#149",
        GRADIENT,
        strategy="fsdp2",
        sync="deferred",
        dtypes="fp32/bf16/fp32 bf16/bf16/fp32",
    ),
    _dtype(
        "reduction:ReducedInComputeDtype",
        "pytorch/pytorch#190626",
        GRADIENT,
        dtypes="fp32/bf16/fp32 bf16/bf16/fp32",
    ),
    _dtype(
        "parameters:ExpertsDividedInBf16",
        "deepspeedai/DeepSpeed#5259",
        GRADIENT,
        kind="mixtral",
        dtypes=_BF16,
    ),
    _dtype("loss:AutocastHardCoded", "verl-project/verl#6150", GRADIENT, dtypes="fp32 fp64"),
    _dtype("start:LoadedThroughBf16", "huggingface/accelerate#3979", GRADIENT),
    # the model that ranks start from
    _start("start:RankSeedsWeights", "pytorch/torchtitan#166", GRADIENT, EXACT),
    _start("start:OtherActivationOnOtherRanks", "hiyouga/EasyR1#36", GRADIENT),
    _start("start:Untied", "facebookresearch/lingua#75", GRADIENT, kind="tied"),
    # micro-batches
    _planner("planner:TrailingMicroBatchDropped", "NVIDIA-NeMo/Automodel#2257", PARTITION),
    _planner(
        "planner:BudgetExceeded",
        "verl-project/verl#7553",
        PARTITION,
        planning="token_budget",
    ),
    _planner(
        "planner:SampleRepeated",
        "huggingface/accelerate#3938",
        PARTITION,
        GRADIENT,
        planning="token_budget",
    ),
    _planner("planner:GroupsTornApart", "textbook", PARTITION, planning="token_budget"),
    _planner("planner:SilentSequenceSkipped", "lightseekorg/TorchSpec#126", PARTITION),
)

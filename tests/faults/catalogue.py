"""The planted faults: their names, where they happened in public, which properties find them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One mistake.

    `engine` is its class by name, `source` a public bug of the same kind,
    or `sensitivity` for an error chosen for its size.

    Every property of `found_by` must find it by itself.
    """

    engine: str
    source: str
    found_by: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.engine.rpartition(":")[2]


def _fault(engine: str, source: str, *found_by: str) -> Fault:
    return Fault(engine=f"tests.faults.{engine}", source=source, found_by=found_by)


GRADIENT = "gradient-matches-oracle"
EXACT = "gradient-is-exact"
SPLIT = "split-invariance"
REPLICAS = "replicas-agree"
DEFERRED = "deferred-equals-eager"

FAULTS: tuple[Fault, ...] = (
    # loss weights
    _fault("loss:SampleShareWeights", "verl-project/verl#5625", GRADIENT, EXACT, SPLIT),
    _fault("loss:NoRankFactor", "meta-pytorch/torchtune#2172", GRADIENT, EXACT, SPLIT),
    _fault("loss:NoRankFactorInOneMode", "verl-project/verl#5366", GRADIENT),
    _fault("loss:LocalTokenCount", "PrimeIntellect-ai/prime-rl#2358", GRADIENT, SPLIT),
    _fault("loss:PaddingCounted", "PrimeIntellect-ai/prime-rl#674", GRADIENT),
    _fault("loss:MeanOfMeans", "verl-project/verl#6957", GRADIENT, SPLIT),
    # when gradients are reduced
    _fault(
        "sync:DeferralIgnored", "NVIDIA/cosmos-framework#162", DEFERRED, "every-unit-is-reduced"
    ),
    _fault("sync:LastSyncSkipped", "karpathy/build-nanogpt#30", GRADIENT, DEFERRED),
    _fault("sync:LastMicroBatchOnly", "NVIDIA/Megatron-LM#7186", GRADIENT, DEFERRED),
    _fault("sync:AccumulatedTwice", "hpcaitech/ColossalAI#247", GRADIENT, EXACT),
    _fault("sync:AccumulatedInBf16", "ISEEKYAN/Megatron-LM#149", GRADIENT),
    _fault("sync:GatheredParametersKept", "verl-project/verl#7458", "retained-bytes-match"),
    _fault("sync:LegacyMeansEager", "verl-project/verl#7458", DEFERRED),
    _fault("sync:GatheredTwice", "pytorch/pytorch#111354", "collectives-match-schedule"),
    _fault("sync:CollectivesInRankOrder", "radixark/miles#3194", "collectives-agree-in-groups"),
    # over which ranks and in which dtype
    _fault("reduction:OneRankShardGroup", "pytorch/pytorch#154888", GRADIENT, REPLICAS),
    _fault("reduction:ReplicasAveragedTwice", "pytorch/torchtitan#2318", GRADIENT, EXACT),
    _fault("reduction:ReplicaAxisDropped", "NVIDIA-NeMo/Automodel#3135", REPLICAS, GRADIENT),
    _fault("reduction:ReducedInComputeDtype", "pytorch/pytorch#190626", GRADIENT),
    _fault("reduction:DividedByShardSize", "meta-pytorch/torchcomms#287", GRADIENT),
    _fault("reduction:ParameterNotReduced", "pytorch/pytorch#98281", GRADIENT),
    _fault("reduction:SmallScaleError", "sensitivity", GRADIENT, EXACT),
    # mesh, strategy, plan, residency
    _fault("sharding:StrategyRowsSwapped", "verl-project/verl#6410", "strategy-is-total"),
    _fault(
        "sharding:ReshardIgnoredOn2dMesh", "verl-project/verl#6410", "residency-matches-strategy"
    ),
    _fault("sharding:OneUnitStaysGathered", "pytorch/pytorch#149029", "residency-matches-strategy"),
    _fault("sharding:MeshFloored", "verl-project/verl#508", "mesh-is-total"),
    _fault(
        "sharding:TrailingMicroBatchDropped",
        "NVIDIA-NeMo/Automodel#2257",
        "micro-batches-partition",
    ),
    _fault("sharding:BudgetExceeded", "verl-project/verl#7553", "micro-batches-partition"),
    # export
    _fault("export:BuffersForgotten", "verl-project/verl#5688", "export-matches-oracle"),
    _fault("export:ExportedInBf16", "verl-project/verl#7161", "export-matches-oracle"),
    _fault("export:StagedInBf16", "verl-project/verl#7161", "staged-export-equals-unstaged"),
    _fault("export:TiedAliasDropped", "deepspeedai/DeepSpeed#1896", "export-matches-oracle"),
    _fault("export:EmbeddingSkipped", "lightseekorg/TorchSpec#39", "export-matches-oracle"),
    _fault("export:StaleAfterStep", "pytorch/pytorch#104770", "export-matches-oracle"),
    _fault("export:LeavesEvalMode", "verl-project/verl#5305", "export-changes-nothing"),
    _fault("export:LocalShardExported", "huggingface/accelerate#4206", "export-matches-oracle"),
    # configuration
    _fault("configuration:YamlDefersByDefault", "verl-project/verl#7458", "entry-points-agree"),
    _fault("configuration:FieldNobodyReads", "verl-project/verl#6153", "every-field-is-probed"),
    _fault(
        "configuration:ClipUnchecked", "verl-project/verl#7923", "illegal-configuration-is-refused"
    ),
    _fault(
        "configuration:RefusedTooLate", "verl-project/verl#508", "illegal-configuration-is-refused"
    ),
    _fault(
        "configuration:UnknownFieldIgnored",
        "Lightning-AI/pytorch-lightning#21928",
        "illegal-configuration-is-refused",
    ),
    _fault(
        "configuration:LossModeNotPassedOn",
        "verl-project/verl#1083",
        "configuration-field-is-observable",
        GRADIENT,
    ),
    _fault(
        "configuration:WeightDecayNotPassedOn",
        "pytorch/pytorch#143828",
        "configuration-field-is-observable",
    ),
)

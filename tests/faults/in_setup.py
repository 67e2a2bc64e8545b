"""Faults in mesh and strategy, in export, and in what a configuration means."""

from __future__ import annotations

from functools import partial

from tests.faults.fault import Fault, fault

EXPORT = "export-matches-oracle"
REFUSED = "illegal-configuration-is-refused"
OBSERVABLE = "configuration-field-is-observable"
RESIDENCY = "residency-matches-strategy"

_sharding = partial(fault, "sharding")
_export = partial(fault, "export")
_configuration = partial(fault, "configuration")

IN_SETUP: tuple[Fault, ...] = (
    # mesh, strategy, residency
    _sharding("sharding:StrategyRowsSwapped", "verl-project/verl#6410", "strategy-is-total"),
    _sharding(
        "sharding:ReshardIgnoredOn2dMesh",
        "verl-project/verl#6410",
        RESIDENCY,
        mesh="grid column row",
        reshard="zero2",
    ),
    _sharding(
        "sharding:OneUnitStaysGathered",
        "pytorch/pytorch#149029",
        RESIDENCY,
        strategy="fsdp2",
        reshard="zero3",
    ),
    _sharding("sharding:MeshFloored", "verl-project/verl#508", "mesh-is-total"),
    # export
    _export("export:BuffersForgotten", "verl-project/verl#5688", EXPORT, kind="buffers"),
    _export("export:BuffersJoined", "verl-project/verl#7612", EXPORT, kind="buffers"),
    _export("export:ExportedInBf16", "pytorch/pytorch#104770", EXPORT),
    _export("export:StagedInBf16", "verl-project/verl#7161", "staged-export-equals-unstaged"),
    _export("export:TiedAliasDropped", "deepspeedai/DeepSpeed#1896", EXPORT, kind="tied"),
    _export(
        "export:EmbeddingSkipped",
        "lightseekorg/TorchSpec#39",
        EXPORT,
        kind="embedding tied llama qwen2 mixtral",
    ),
    _export("export:FrozenExportedEmpty", "deepspeedai/DeepSpeed#3205", EXPORT, kind="frozen"),
    _export("export:StaleAfterStep", "NVIDIA/Megatron-LM#6336", EXPORT),
    _export("export:LeavesEvalMode", "RLinf/RLinf#1033", "export-changes-nothing"),
    _export("export:LocalShardExported", "huggingface/accelerate#4206", EXPORT),
    _export("export:PaddedRowsExported", "pytorch/torchtitan#4593", EXPORT),
    # configuration
    _configuration(
        "configuration:YamlDefersByDefault", "verl-project/verl#7458", "entry-points-agree"
    ),
    _configuration(
        "configuration:FieldNobodyReads",
        "Lightning-AI/pytorch-lightning#21928",
        "every-field-is-probed",
    ),
    _configuration("configuration:ClipUnchecked", "verl-project/verl#7923", REFUSED),
    _configuration("configuration:RefusedTooLate", "verl-project/verl#508", REFUSED),
    _configuration(
        "configuration:UnknownFieldIgnored", "Lightning-AI/pytorch-lightning#21928", REFUSED
    ),
    _configuration(
        "configuration:LossModeNotPassedOn",
        "verl-project/verl#1083",
        OBSERVABLE,
        "gradient-matches-oracle",
    ),
    _configuration(
        "configuration:WeightDecayNotPassedOn",
        "pytorch/pytorch#143828",
        OBSERVABLE,
    ),
)

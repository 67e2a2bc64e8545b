"""Faults in what leaves the engine: adapters, merged weights, experts, exports taken in parts."""

from __future__ import annotations

from functools import partial

from tests.faults.fault import Fault, fault

EXPORT = "export-matches-oracle"
NOTHING = "export-changes-nothing"
PHASES = "two-phase-sync-equals-merged"
SWITCH = "adapter-switch-matches-oracle"

_merge = partial(fault, "merge", adapter="lora")
_adapter = partial(fault, "adapter", adapter="lora")
_taking = partial(fault, "taking")
_experts = partial(fault, "experts")

_HAS_EMBEDDING = "embedding tied qwen2"

IN_WEIGHTS: tuple[Fault, ...] = (
    # an adapter added to the weights
    _merge("merging:AdapterForgotten", "verl-project/verl#4553", EXPORT, PHASES),
    _merge("merging:MergedTwice", "huggingface/peft#1355", EXPORT, PHASES),
    _merge("merging:MergedFromOwnShard", "meta-pytorch/torchtune#506", EXPORT, PHASES),
    _merge("merging:ScaledByAlpha", "textbook", EXPORT, PHASES),
    _merge("merging:ZeroAlphaIsNone", "textbook", PHASES),
    _merge("merging:MergedInBf16", "unslothai/unsloth-zoo#810", EXPORT, PHASES),
    _merge("merging:EmbeddingNotMerged", "textbook", EXPORT, PHASES, kind=_HAS_EMBEDDING),
    _merge("merging:RootNotMerged", "meta-pytorch/torchtune#506", EXPORT, PHASES),
    _merge("merging:TiedPairMergedAsOne", "huggingface/peft#2777", PHASES, kind="tied"),
    # a merge that is taken back
    _merge("merging:MergeClosedTooEarly", "verl-project/verl#7014", SWITCH),
    _merge("merging:BaseStaysMerged", "verl-project/verl#7014", SWITCH),
    _merge("merging:BaseRestoredBySubtraction", "huggingface/peft#1355", SWITCH),
    _merge("merging:MergedIntoShardsAlone", "pytorch/pytorch#104770", SWITCH, strategy="fsdp1"),
    _merge("adapter_export:MergedUntilDrained", "verl-project/verl#7014", NOTHING),
    # an adapter that is switched off
    _adapter("merging:WrapperHidesAdapter", "huggingface/trl#6527", SWITCH, strategy="fsdp1"),
    _adapter("adapter_export:DisableIgnored", "huggingface/trl#6527", SWITCH),
    _adapter("merging:OneLayerDisabled", "huggingface/trl#6527", SWITCH),
    _adapter("merging:DisabledStopsTraining", "textbook", SWITCH),
    # an adapter that is exported
    _adapter("adapter_export:AdapterOfOwnShard", "huggingface/accelerate#4206", EXPORT, PHASES),
    _adapter("adapter_export:BaseSentAgain", "verl-project/verl#7495", EXPORT, PHASES),
    _adapter("adapter_export:FirstAdapterKept", "verl-project/verl#3821", EXPORT),
    _adapter("adapter_export:WrapperInAdapterNames", "MakazhanAlpamys/Soup#351", EXPORT, PHASES),
    _adapter("adapter_export:BaseLayerInNames", "verl-project/verl#7413", EXPORT, PHASES),
    _adapter("adapter_export:AdapterNameLeftIn", "verl-project/verl#7413", EXPORT),
    _adapter(
        "adapter_export:AdapterEmptyUnderFsdp1",
        "verl-project/verl-omni#607",
        EXPORT,
        PHASES,
        strategy="fsdp1",
    ),
    _adapter("adapter_export:LayeredMissesRoot", "verl-project/verl#3231", PHASES),
    _adapter("adapter_export:AdapterAddedOnBothSides", "ISEEKYAN/Megatron-LM#75", EXPORT, PHASES),
    # experts one by one
    _experts("adapter_export:ExpertsStayFused", "verl-project/verl#6896", EXPORT, kind="mixtral"),
    _experts("adapter_export:GateAndUpExchanged", "textbook", EXPORT, kind="mixtral"),
    _experts("adapter_export:FirstExpertEverywhere", "textbook", EXPORT, kind="mixtral"),
    # exports taken in parts, or after something else
    _taking("adapter_export:GoesOnAfterStep", "verl-project/verl#7005", EXPORT),
    _taking("adapter_export:StopsShortAfterStep", "textbook", EXPORT),
    _taking("adapter_export:ExportsWhatInferenceGathered", "pytorch/pytorch#104770", EXPORT),
)

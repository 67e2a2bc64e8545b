"""Faults that a device alone shows. They are searched on the simulated one."""

from __future__ import annotations

from dataclasses import replace

from tests.faults.fault import Fault, fault

MEMORY = "device-memory-matches-oracle"
PEAK = "device-peak-matches-oracle"
COPIES = "device-copies-are-needed"
ORDER = "device-order-is-kept"
REST = "tensors-rest-where-asked"
SAME = "offload-changes-nothing"


_MODULES = {
    "memory": "device_memory",
    "peak": "device_memory",
    "copies": "device_copies",
    "order": "device_order",
    "residency": "residency",
}


def _on_device(kind: str, name: str, source: str, /, *found_by: str, **shows_in: str) -> Fault:
    path = f"{_MODULES[kind]}:{name}"
    return replace(fault(kind, path, source, *found_by, **shows_in), device="sim")


def _residency(name: str, source: str, /, *found_by: str, **shows_in: str) -> Fault:
    return _on_device("residency", name, source, *found_by, **shows_in)


IN_DEVICES: tuple[Fault, ...] = (
    # memory that stays
    _on_device(
        "memory", "NotFreedAfterBackward", "pytorch/pytorch#149029", MEMORY, strategy="fsdp2"
    ),
    _on_device("memory", "OutputsKept", "verl-project/verl#6699", MEMORY),
    _on_device("memory", "MetricsKeepGraphs", "verl-project/verl#6984", MEMORY),
    _on_device("memory", "InputsKept", "verl-project/verl#6698", MEMORY),
    _on_device("memory", "GradientBuffersKept", "textbook", MEMORY),
    _on_device("memory", "WeightsKeptTwice", "huggingface/accelerate#3482", MEMORY),
    _on_device("memory", "MasterWeightsOnDevice", "huggingface/accelerate#3482", MEMORY),
    # memory that is gone again behind a pass
    _on_device("peak", "GatheredAllAhead", "pytorch/pytorch#149029", PEAK, strategy="fsdp2"),
    _on_device("peak", "ActivationsCopied", "textbook", PEAK),
    _on_device("peak", "ScratchForEveryParameter", "textbook", PEAK),
    # copies that nobody needs
    _on_device("copies", "LossReadPerToken", "textbook", COPIES),
    _on_device("copies", "NormReadPerParameter", "textbook", COPIES),
    _on_device("copies", "CheckedInForward", "textbook", COPIES),
    _on_device("copies", "ParametersVisitHost", "verl-project/verl#7005", COPIES),
    _on_device("copies", "ExportedThroughHost", "verl-project/verl#7005", COPIES),
    _on_device("copies", "StagedWithoutNeed", "verl-project/verl#7005", COPIES),
    _on_device("copies", "SmallTensorsLeftOnHost", "textbook", "export-matches-oracle"),
    # work out of order
    _on_device("order", "StepDoesNotWait", "ByteDance-Seed/VeOmni#419", ORDER),
    _on_device("order", "LossReadBeforeItArrived", "facebookresearch/fairscale#496", ORDER),
    _on_device("order", "InputsDoNotWait", "textbook", ORDER),
    _on_device("order", "ExportDoesNotWait", "verl-project/verl#7347", ORDER),
    _on_device("order", "StagingBufferReused", "deepspeedai/DeepSpeed#7965", ORDER),
    _on_device("order", "GradientsScaledAside", "pytorch/pytorch#115710", ORDER),
    _on_device("order", "FreedWhileInUse", "meta-pytorch/torchtune#1867", ORDER),
    # what rests on the host
    _residency("ModelStaysLoaded", "verl-project/verl#4777", REST),
    _residency("OptimizerStaysLoaded", "verl-project/verl#5753", REST),
    _residency("StaysLoadedAfterException", "textbook", REST),
    _residency("ResumedOntoDevice", "verl-project/verl#402", REST),
    _residency("StateBeforeFirstStep", "verl-project/verl#299", REST),
    _residency("BuffersLeftBehind", "verl-project/verl#6196", REST, kind="buffers"),
    _residency("LocalShardLeftBehind", "textbook", REST, strategy="fsdp1"),
    _residency("OffloadDoesNotWait", "verl-project/verl#7347", ORDER, strategy="fsdp2"),
    _residency("AlwaysStages", "verl-project/verl#7005", COPIES, strategy="fsdp2"),
    _residency("StagedAndForgotten", "verl-project/verl#7103", REST),
    _residency("ExportedWhereItRests", "verl-project/verl#7005", REST),
    _residency("OptimizerLoadedForForward", "verl-project/verl#2822", MEMORY),
    _residency("UsedGradientsMoved", "textbook", COPIES),
    _residency("SteppedOnACopy", "NovaSky-AI/SkyRL#2215", SAME),
)

"""The case's model as verl loads one: a folder of Hugging Face's, and the classes it names.

verl takes causal language models by their config. The language families of the workload are such;
the torch families become one here: the same layers under the same names, with features and gates
coming the way verl hands pictures to a model, as a sequence's multi-modal inputs.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from fsdp_engine.contract.case import Case
from fsdp_engine.contract.model import Model
from fsdp_engine.contract.protocol import RankContext
from fsdp_engine.workload.models import Block, TorchModel

LORA_MARK = ".lora_"


class WorkloadConfig(PretrainedConfig):  # type: ignore[no-untyped-call]  # so in transformers
    """A torch family's `Model` as a config: its fields under `workload`."""

    model_type = "fsdp_properties_workload"

    def __init__(self, workload: dict[str, Any] | None = None, **other: Any) -> None:
        super().__init__(**other)
        self.workload = workload or {}
        # verl asks every model, for a sharding over sequences that is off here
        self.num_attention_heads = self.num_key_value_heads = 1


class WorkloadForCausalLM(PreTrainedModel):  # type: ignore[no-untyped-call]  # there too
    """`TorchModel` with the calls that verl, peft and transformers make of a language model."""

    config_class = WorkloadConfig
    base_model_prefix = ""
    _no_split_modules = [Block.__name__]  # noqa: RUF012  transformers' own form
    _tied_weights_keys = {"head.weight": "embed.weight"}  # noqa: RUF012

    def __init__(self, config: WorkloadConfig) -> None:
        super().__init__(config)
        model = Model(**config.workload)
        inner = TorchModel(dataclasses.replace(model, tied=False))
        self.width, self.skips_last, self.embed = model.width, inner.skips_last, inner.embed
        self.layers, self.head = inner.layers, inner.head
        for name, buffer in inner.named_buffers(recurse=False):
            self.register_buffer(name, buffer)
        self.post_init()  # type: ignore[no-untyped-call]  # there too

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        features: Tensor | None = None,
        gates: Tensor | None = None,
        **_: Any,
    ) -> CausalLMOutput:
        """`features` `[tokens of all sequences, width]`, `gates` `[sequences]`."""
        if features is not None:
            padded = features.new_zeros((*attention_mask.shape, self.width))
            padded[attention_mask.bool()] = features
            features = padded
        arguments = {"features": features, "input_ids": input_ids, "gates": gates}
        return CausalLMOutput(logits=TorchModel.forward(self, **arguments))  # type: ignore[arg-type]

    def get_input_embeddings(self) -> nn.Module:
        return self.layers[0] if self.embed is None else self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def prepare_inputs_for_generation(self, *_: Any, **__: Any) -> dict[str, Any]:
        """What peft asks every causal language model for; nothing is generated."""
        return {}

    def _init_weights(self, _: nn.Module) -> None:
        """Every weight is in the folder."""


AutoConfig.register(WorkloadConfig.model_type, WorkloadConfig)
AutoModelForCausalLM.register(WorkloadConfig, WorkloadForCausalLM)


def new_folder(rank: RankContext) -> Path:
    """A folder of this rank's own for one model; it goes with the case."""
    parent = Path(rank.directory, f"models-{rank.rank}")
    parent.mkdir(parents=True, exist_ok=True)
    return parent / str(len(list(parent.iterdir())))


def save_model(module: nn.Module, case: Case, folder: Path) -> None:
    """Write the base of `build_model(case)` to a folder that verl can load it from."""
    base: Any = module
    if case.model.lora_rank:
        base = base.get_base_model()
    folder.mkdir(parents=True)
    config_of(base, case).save_pretrained(folder)
    state = {
        name.replace(".base_layer", ""): tensor.contiguous()
        for name, tensor in base.state_dict().items()
        if LORA_MARK not in name
    }
    if case.model.tied:
        state = {
            name: t for name, t in state.items() if name not in ("head.weight", "lm_head.weight")
        }
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def config_of(base: Any, case: Case) -> PretrainedConfig:
    """The config of a language family's module, or one made for a torch family's."""
    if case.model.is_language:
        config: PretrainedConfig = base.config
        config.architectures = [type(base).__name__]
        return config
    return WorkloadConfig(
        workload=dataclasses.asdict(case.model.without_adapter),
        architectures=[WorkloadForCausalLM.__name__],
        tie_word_embeddings=case.model.tied,
    )


def adapter_weights(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter of the adapter by its name."""
    return {n: p.detach() for n, p in module.named_parameters() if LORA_MARK in n}


def adapter_targets(module: Any) -> str | list[str]:
    """The layers that the case's adapter is on, as peft matches them: a pattern, or its own set.

    With packed experts it is the latter, which verl takes for a list alone.
    """
    targets: str | set[str] = module.peft_config["default"].target_modules
    return targets if isinstance(targets, str) else sorted(targets)


def fill_adapter(module: nn.Module, weights: dict[str, Tensor]) -> None:
    """Give the adapter that verl has made the case's weights, where it is not on `meta`."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name in weights and not parameter.is_meta:
                parameter.copy_(weights[name])

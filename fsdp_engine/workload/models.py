"""The model of a case, weights included: where engine and oracle both start.

`build_model` returns a plain module on the CPU with parameters in the storage dtype and floating
buffers in fp32 (fp64 for fp64 storage). Every weight depends on `(case.seed, its name)` alone.
"""

from __future__ import annotations

import functools
import math
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fsdp_engine.contract.case import Case
from fsdp_engine.contract.model import LoraTargets, Model, Part
from fsdp_engine.workload.seeds import generator

TORCH_DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

_IN_UNITS = r".*layers\.\d+\.(.*\.)?"
_LINEAR = "linear|up|down|q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj"
_IN_ROOT = r"(.*\.)?(embed|embed_tokens|head|lm_head)"
_LORA_TARGETS: dict[LoraTargets, str] = {
    "units": f"{_IN_UNITS}({_LINEAR})",
    "named": f"{_IN_UNITS}(linear|up|q_proj)",
    "root": _IN_ROOT,
    "all": f"{_IN_UNITS}({_LINEAR})|{_IN_ROOT}",
}


class Block(nn.Module):
    """One wrapped unit of the torch families.

    `linear`: relu(W x). Otherwise residual: x + down(relu(up(x))). With a buffer the result is
    scaled by it; with an optional parameter gated sequences get it added, and with another one
    those that are not gated get that.
    """

    def __init__(self, model: Model, *, is_last: bool) -> None:
        super().__init__()
        self.residual = model.family != "linear"
        if self.residual:
            self.up = nn.Linear(model.width, model.hidden, bias=model.bias)
            self.down = nn.Linear(model.hidden, model.width, bias=model.bias)
        else:
            self.linear = nn.Linear(model.width, model.width, bias=model.bias)
        optional = model.optional if is_last else "none"
        self.extra = _vector(model) if optional in ("parameter", "either") else None
        self.other = _vector(model) if optional == "either" else None
        self.scale: Tensor | None
        self.register_buffer("scale", torch.empty(model.width) if model.buffers else None)

    def forward(self, x: Tensor, gates: Tensor) -> Tensor:
        y: Tensor
        if self.residual:
            y = x + self.down(functional.relu(self.up(x)))
        else:
            y = functional.relu(self.linear(x))
        if self.scale is not None:
            y = y * self.scale.to(y.dtype)
        if self.extra is not None and bool(gates.any()):
            y = torch.where(gates[:, None, None], y + self.extra, y)
        if self.other is not None and not bool(gates.all()):
            y = torch.where(gates[:, None, None], y, y + self.other)
        return y


def _vector(model: Model) -> nn.Parameter:
    return nn.Parameter(torch.empty(model.width))


class TorchModel(nn.Module):
    """A stack of blocks over features or an embedding, with a linear head, both in the root."""

    _no_split_modules = ("Block",)

    def __init__(self, model: Model) -> None:
        super().__init__()
        last = model.units - 1
        self.embed = nn.Embedding(model.vocab, model.width) if model.takes_tokens else None
        self.layers = nn.ModuleList(
            Block(model, is_last=index == last) for index in range(model.units)
        )
        self.head = nn.Linear(model.width, model.vocab, bias=model.bias)
        self.skips_last = model.optional == "unit"
        if model.tied and self.embed is not None:
            self.head.weight = self.embed.weight
        if model.buffers:
            self.register_buffer("revision", torch.empty(2, dtype=torch.int64))

    def forward(
        self,
        features: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,  # noqa: ARG002  tokens do not see each other here
        gates: Tensor | None = None,
    ) -> Tensor:
        x = features if self.embed is None else self.embed(input_ids)
        assert isinstance(x, Tensor)
        if gates is None:
            gates = torch.ones(len(x), dtype=torch.bool, device=x.device)
        for index, layer in enumerate(self.layers):
            if self.skips_last and index == len(self.layers) - 1:
                if bool(gates.any()):
                    x = torch.where(gates[:, None, None], layer(x, gates), x)
            else:
                x = layer(x, gates)
        logits: Tensor = self.head(x)
        return logits


def build_model(case: Case) -> nn.Module:
    """The case's module, adapter included, every weight filled from the seed."""
    model = case.model
    module = _bare(model)
    _fill(module, case)
    storage = TORCH_DTYPES[case.dtypes.storage]
    for parameter in module.parameters():
        parameter.data = parameter.data.to(storage)
    if storage == torch.float64:
        for name, buffer in module.named_buffers():
            if buffer.is_floating_point():
                setattr(module.get_submodule(_owner(name)), _leaf(name), buffer.double())
    _freeze(module, model)
    return module


@functools.lru_cache(maxsize=64)
def parameter_names(model: Model) -> tuple[str, ...]:
    """Names of the parameters of `build_model`, in its order; only the model decides them."""
    return tuple(name for name, _ in _bare(model).named_parameters())


@functools.lru_cache(maxsize=64)
def state_names(model: Model) -> tuple[str, ...]:
    """Names in the state dict of `build_model`: persistent buffers, both names of a tied pair."""
    return tuple(_bare(model).state_dict())


@functools.lru_cache(maxsize=64)
def trained_names(model: Model) -> frozenset[str]:
    """The parameters of `build_model` that take gradients before any freeze or unfreeze."""
    module = _bare(model)
    _freeze(module, model)
    return frozenset(name for name, p in module.named_parameters() if p.requires_grad)


def unit_names(case: Case) -> tuple[str, ...]:
    """Module paths of the wrapped units, in forward order; the root is not among them."""
    return tuple(f"{_stem(case.model)}layers.{index}" for index in range(case.model.units))


def unit_of(case: Case, parameter_name: str) -> str:
    """The unit that owns a parameter or buffer; empty for the root."""
    for name in unit_names(case):
        if parameter_name.startswith(name + "."):
            return name
    return ""


def part_names(case: Case, part: Part) -> tuple[str, ...]:
    """Names of the parameters that a freeze or unfreeze action is about, in the model's order."""
    names = enumerate(parameter_names(case.model))
    return tuple(name for index, name in names if _is_in(case.model, name, part, index=index))


def module_arguments(case: Case, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The micro-batch's inputs that the case's module takes."""
    if case.model.is_language:
        return {name: value for name, value in inputs.items() if name != "gates"}
    return inputs


def _bare(model: Model) -> nn.Module:
    """The module, adapter included, with weights of no meaning."""
    module = _language_model(model) if model.is_language else TorchModel(model)
    return _with_adapter(module, model) if model.lora_rank else module


def _stem(model: Model) -> str:
    adapter = "base_model.model." if model.lora_rank else ""
    return adapter + ("model." if model.is_language else "")


def _language_model(model: Model) -> nn.Module:
    import transformers  # noqa: PLC0415  costs seconds; most cases do without

    common: dict[str, Any] = {
        "vocab_size": model.vocab,
        "hidden_size": model.width,
        "intermediate_size": model.hidden,
        "num_hidden_layers": model.units,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 256,
        "tie_word_embeddings": model.tied,
        "use_cache": False,
        "attn_implementation": "eager",
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    module: nn.Module
    match model.family:
        case "llama":
            module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**common))
        case "qwen2":
            module = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**common))
        case "mixtral":
            common["experts_implementation"] = "eager"  # the grouped kernel has no fp64
            config = transformers.MixtralConfig(
                num_local_experts=4,
                num_experts_per_tok=2,
                output_router_logits=False,
                **common,
            )
            module = transformers.MixtralForCausalLM(config)
        case _:
            raise AssertionError(model.family)
    return module


def _with_adapter(module: nn.Module, model: Model) -> nn.Module:
    import peft  # noqa: PLC0415  costs seconds; most cases do without

    config = peft.LoraConfig(
        r=model.lora_rank,
        lora_alpha=model.lora_alpha,
        target_modules=_LORA_TARGETS[model.lora_targets],
        lora_dropout=0.0,
        bias="none",
    )
    with warnings.catch_warnings():
        # That the two places of a tied pair get adapters of their own is what is asked for.
        warnings.filterwarnings("ignore", message=r"Model (has|with) `tie_word_embeddings=True`")
        adapted: nn.Module = peft.get_peft_model(module, config, autocast_adapter_dtype=False)
    return adapted


def _fill(module: nn.Module, case: Case) -> None:
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            gen = generator(case.seed, "parameter", name)
            parameter.copy_(_weights(name, parameter.shape, gen, exact=case.exact))
        if case.model.is_language:
            return  # buffers of language models follow from the config
        for name, buffer in module.named_buffers():
            gen = generator(case.seed, "buffer", name)
            if buffer.is_floating_point():
                buffer.copy_(2.0 ** torch.randint(-1, 2, buffer.shape, generator=gen))
            else:
                buffer.copy_(torch.randint(100, buffer.shape, generator=gen))


def _weights(name: str, shape: torch.Size, gen: torch.Generator, *, exact: bool) -> Tensor:
    if exact:
        return torch.randint(-1, 2, shape, generator=gen).double()
    drawn = torch.randn(shape, generator=gen, dtype=torch.float64)
    if len(shape) >= 2:
        return drawn / math.sqrt(shape[-1])
    return 0.125 * drawn + (1.0 if "norm" in name else 0.0)


def _freeze(module: nn.Module, model: Model) -> None:
    if model.frozen == "none":
        return
    for index, (name, parameter) in enumerate(module.named_parameters()):
        if _is_in(model, name, model.frozen, index=index):
            parameter.requires_grad_(False)  # noqa: FBT003  torch's own signature


def _is_in(model: Model, name: str, part: Part, *, index: int) -> bool:
    match part:
        case "first_unit":
            return name.startswith(f"{_stem(model)}layers.0.")
        case "biases":
            return name.endswith(".bias")
        case "half":
            return index % 2 == 1


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]

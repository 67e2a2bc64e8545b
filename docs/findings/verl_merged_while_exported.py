"""verl 0.9.1, LoRA: while a merged export is not taken to its end, the model itself is merged.

get_per_tensor_param merges into the live weights, streams, and restores them behind the last one:
a checkpoint that is saved meanwhile has the adapter in its base, and a batch trains no adapter.
Control: behind the last one the base is as before. Exit: 0 fixed, 1 reproduced, 2 could not run.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import _init_utils
from transformers import LlamaConfig, LlamaForCausalLM  # verl's own requirement
from verl.plugin.platform import platform_cuda, set_platform


class Cpu(platform_cuda.PlatformCUDA):
    device_name, is_available = "cpu", lambda _: True
    current_device = lambda _: type("Here", (str,), {"__format__": lambda *_: "0"})("cpu")
    empty_cache, memory_allocated, memory_reserved = (lambda _=0: 0,) * 3
    mem_get_info, device_module = lambda _: (0, 0), property(lambda self: self)


set_platform(Cpu())
_init_utils._check_module_states_for_sync_module_states = lambda _: None  # gloo sends from a host
from verl.trainer.config import CheckpointConfig  # noqa: E402
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig  # noqa: E402
from verl.workers.engine.fsdp import FSDPEngineWithLMHead  # noqa: E402

PADDED, LOW = {"use_remove_padding": False}, {"param_dtype": "fp32", "reduce_dtype": "fp32"}
MODEL = PADDED | {"load_tokenizer": False, "override_config": {"attn_implementation": "eager"}}


def engine(path, lora, **fields):
    config = FSDPEngineConfig(mixed_precision=LOW, use_torch_compile=False, **fields)
    model = HFModelConfig(path=path, **MODEL, **lora)
    made = FSDPEngineWithLMHead(model, config, FSDPOptimizerConfig(lr=0.1), CheckpointConfig())
    made.initialize()
    return made


def scenario(rank, path):
    dist.init_process_group("gloo", f"file://{path}/store", rank=rank, world_size=2)
    lora = {"lora_rank": 2, "target_modules": ["q_proj"], "lora": {"merge": True}}
    made = engine(path, lora=lora, strategy="fsdp2")
    parameters = dict(made.module.named_parameters())
    with torch.no_grad():
        for name, parameter in parameters.items():
            if "lora_" in name:
                parameter.fill_(1.0)
    (base,) = (p for name, p in parameters.items() if name.endswith("q_proj.base_layer.weight"))
    before = base.full_tensor()
    tensors = iter(made.get_per_tensor_param()[0])
    next(tensors)
    meanwhile = base.full_tensor()
    for _ in tensors:
        pass
    return torch.equal(base.full_tensor(), before), not torch.equal(meanwhile, before)


console, sys.stdout = sys.stdout, sys.stderr  # where all other words go
sys.excepthook = lambda *e: print("COULD NOT RUN", e, file=console) or __import__("os")._exit(2)
with tempfile.TemporaryDirectory() as path, mp.get_context("fork").Pool(2) as pool:
    sizes = {"vocab_size": 8, "hidden_size": 32, "intermediate_size": 8, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(path)
    ((control, seen), _) = pool.starmap_async(scenario, [(0, path), (1, path)], 1).get(60)
word = ("REPRODUCED" if seen else "FIXED") if control else "COULD NOT RUN"
print(
    f"{word}: the base holds the adapter while a merged export is open ({control=}, {seen=})",
    file=console,
)
sys.exit(int(seen) if control else 2)

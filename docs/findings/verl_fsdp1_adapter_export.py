"""verl 0.9.1 with peft 0.21, FSDP1, LoRA: the export of the adapter has nothing in it.

get_per_tensor_param(base_sync_done=True) sends the adapter: two tensors a layer.
Control: the same under FSDP2. Exit: 0 fixed, 1 reproduced, 2 could not run.
"""

import sys
import tempfile

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


def exported(path, strategy):
    made = engine(path, lora={"lora_rank": 2, "target_modules": ["q_proj"]}, strategy=strategy)
    return len(dict(made.get_per_tensor_param(base_sync_done=True)[0]))


def scenario(rank, path):
    dist.init_process_group("gloo", f"file://{path}/store", rank=rank, world_size=2)
    return exported(path, "fsdp2") == 2, exported(path, "fsdp") == 0


console, sys.stdout = sys.stdout, sys.stderr  # where all other words go
sys.excepthook = lambda *e: print("COULD NOT RUN", e, file=console) or __import__("os")._exit(2)
with tempfile.TemporaryDirectory() as path, mp.get_context("fork").Pool(2) as pool:
    sizes = {"vocab_size": 8, "hidden_size": 32, "intermediate_size": 8, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(path)
    ((control, seen), _) = pool.starmap_async(scenario, [(0, path), (1, path)], 1).get(60)
word = ("REPRODUCED" if seen else "FIXED") if control else "COULD NOT RUN"
print(f"{word}: FSDP1 exports no tensor of the adapter ({control=}, {seen=})", file=console)
sys.exit(int(seen) if control else 2)

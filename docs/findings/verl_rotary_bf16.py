"""verl 0.9.1, model_dtype bf16: the frequencies of the rotary embedding are rounded to bf16.

_build_module ends in module.to(bf16), which casts buffers too; from_pretrained(dtype=bf16) leaves
inv_freq in fp32. What was rounded stays so, also where FSDP1 casts it back: the later a position,
the more wrong its angle.
Control: model_dtype fp32 has the frequencies exactly. Exit: 0 fixed, 1 reproduced, 2 could not run.
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
THETA, POSITION = 1e6, 4096  # as many models have it; heads of 64


def frequencies(path, strategy, model_dtype):
    fields = {"strategy": strategy, "model_dtype": model_dtype, "use_torch_compile": False}
    config = FSDPEngineConfig(mixed_precision=LOW, **fields)
    model = HFModelConfig(path=path, **MODEL)
    made = FSDPEngineWithLMHead(model, config, FSDPOptimizerConfig(lr=0.1), CheckpointConfig())
    made.initialize()
    (found,) = (b for name, b in made.module.named_buffers() if name.endswith(".inv_freq"))
    return found.float()


def scenario(rank, path):
    dist.init_process_group("gloo", f"file://{path}/store", rank=rank, world_size=2)
    wanted = LlamaForCausalLM.from_pretrained(path, dtype=torch.bfloat16).model.rotary_emb.inv_freq
    control, off = wanted.dtype == torch.float32, {}
    for strategy in ("fsdp", "fsdp2"):
        control &= torch.equal(frequencies(path, strategy, "fp32"), wanted)
        low = frequencies(path, strategy, "bf16")
        off[strategy] = float((low - wanted).abs().max()) * POSITION
    return control, off


console, sys.stdout = sys.stdout, sys.stderr  # where all other words go
sys.excepthook = lambda *e: print("COULD NOT RUN", e, file=console) or __import__("os")._exit(2)
with tempfile.TemporaryDirectory() as path, mp.get_context("fork").Pool(2) as pool:
    sizes = {"vocab_size": 8, "hidden_size": 128, "intermediate_size": 8, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 8192}
    rope = {"rope_type": "default", "rope_theta": THETA}
    LlamaForCausalLM(LlamaConfig(**sizes, rope_parameters=rope)).save_pretrained(path)
    ((control, off), _) = pool.starmap_async(scenario, [(0, path), (1, path)], 1).get(60)
seen = any(off.values())
word = ("REPRODUCED" if seen else "FIXED") if control else "COULD NOT RUN"
told = ", ".join(f"{strategy} {angle:.2f}" for strategy, angle in off.items())
print(f"{word}: radians off at position {POSITION}: {told} ({control=}, {seen=})", file=console)
sys.exit(int(seen) if control else 2)

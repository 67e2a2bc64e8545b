"""verl 0.9.1, FSDP2, LoRA: merging raises where a layer has fewer rows than the mesh has shards.

fsdp_merge_unmerge gathers by FSDP1's summon_full_params, which does nothing to FSDP2's modules; so
peft adds to a sharded weight in place, and of 2 rows on 3 ranks the product is replicated.
Control: 3 rows on 3 ranks are merged. Exit: 0 fixed, 1 reproduced, 2 could not run.
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


def error(folder):
    """What merging the adapters of a projection raises."""
    lora = {"lora_rank": 2, "target_modules": ["gate_proj"], "lora": {"merge": True}}
    made = engine(folder, lora=lora, strategy="fsdp2")
    try:
        dict(made.get_per_tensor_param()[0])
    except RuntimeError as raised:
        return str(raised).strip().splitlines()[0]
    return None


def scenario(rank, path):
    dist.init_process_group("gloo", f"file://{path}/store", rank=rank, world_size=3)
    return error(f"{path}/2"), error(f"{path}/3")


console, sys.stdout = sys.stdout, sys.stderr  # where all other words go
sys.excepthook = lambda *e: print("COULD NOT RUN", e, file=console) or __import__("os")._exit(2)
with tempfile.TemporaryDirectory() as path, mp.get_context("fork").Pool(3) as pool:
    for rows in (2, 3):
        sizes = {"vocab_size": 8, "hidden_size": 32, "num_hidden_layers": 1}
        config = LlamaConfig(**sizes, intermediate_size=rows)
        LlamaForCausalLM(config).save_pretrained(f"{path}/{rows}")
    ((few, enough), *_) = pool.starmap_async(scenario, [(r, path) for r in range(3)], 1).get(60)
control, seen = enough is None, few is not None
word = ("REPRODUCED" if seen else "FIXED") if control else "COULD NOT RUN"
print(f"{word}: merging 2 rows on 3 ranks: {few} ({control=}, {seen=})", file=console)
sys.exit(int(seen) if control else 2)

"""verl 0.9.1, FSDP2, param_offload: an exception in a forward comes out as another one.

Without reshard_after_forward what is gathered stays so, and train_mode() offloads on the way out by
moving the module: torch takes gathered tensors for the shards, and stops half way.
Control: with reshard_after_forward. Exit: 0 fixed, 1 reproduced, 2 could not run.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import _init_utils
from torch.distributed.tensor import DTensor
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


def engine(path, **fields):
    config = FSDPEngineConfig(mixed_precision=LOW, use_torch_compile=False, **fields)
    model = HFModelConfig(path=path, **MODEL)
    made = FSDPEngineWithLMHead(model, config, FSDPOptimizerConfig(lr=0.1), CheckpointConfig())
    made.initialize()
    return made


def interrupted(path, **fields):
    """What comes out of an exception in the head, and whether all parameters are sharded."""
    made = engine(path, strategy="fsdp2", param_offload=True, **fields)

    def stop(*_):
        raise KeyError("a bad batch")

    head = next(m for name, m in made.module.named_modules() if name.endswith("lm_head"))
    head.register_forward_hook(stop)
    try:
        with made.train_mode():
            made.module(input_ids=torch.zeros(1, 3, dtype=torch.long))
    except Exception as error:
        sharded = [isinstance(parameter, DTensor) for parameter in made.module.parameters()]
        return repr(error), all(sharded)


def scenario(rank, path):
    dist.init_process_group("gloo", f"file://{path}/store", rank=rank, world_size=2)
    return interrupted(path), interrupted(path, reshard_after_forward=False)


console, sys.stdout = sys.stdout, sys.stderr  # where all other words go
sys.excepthook = lambda *e: print("COULD NOT RUN", e, file=console) or __import__("os")._exit(2)
with tempfile.TemporaryDirectory() as path, mp.get_context("fork").Pool(2) as pool:
    sizes = {"vocab_size": 8, "hidden_size": 32, "intermediate_size": 8, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(path)
    ((zero3, zero2), _) = pool.starmap_async(scenario, [(0, path), (1, path)], 1).get(60)
wanted = ("KeyError('a bad batch')", True)
control, seen = zero3 == wanted, zero2 != wanted
word = ("REPRODUCED" if seen else "FIXED") if control else "COULD NOT RUN"
print(f"{word}: error and whether all is sharded: {zero2} ({control=}, {seen=})", file=console)
sys.exit(int(seen) if control else 2)

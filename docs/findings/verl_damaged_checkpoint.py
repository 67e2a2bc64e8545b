"""verl 0.9.1: a checkpoint with a flipped bit is loaded without a word.

A bit in the middle of the weights of rank 0's file is flipped; loading must raise.
Control: unharmed it gives the same weights back. Exit: 0 fixed, 1 reproduced, 2 could not run.
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
    get_rng_state, set_rng_state = lambda _: torch.get_rng_state(), lambda _, s: None


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


def weights(made):
    return {name: p.full_tensor().clone() for name, p in made.module.named_parameters()}


def scenario(rank, path):
    dist.init_process_group("gloo", f"file://{path}/store", rank=rank, world_size=2)
    made = engine(path, strategy="fsdp2")
    before, folder = weights(made), f"{path}/saved"
    made.save_checkpoint(folder)
    made.load_checkpoint(folder, del_local_after_load=False)
    same = all(torch.equal(before[n], t) for n, t in weights(made).items())
    file = f"{folder}/model_world_size_2_rank_0.pt"
    if rank == 0:
        content = bytearray(open(file, "rb").read())
        first = made.module.state_dict()["model.embed_tokens.weight"].to_local()
        content[content.find(first.numpy().tobytes()) + 2] ^= 64
        open(file, "wb").write(content)
    dist.barrier()
    made.load_checkpoint(folder, del_local_after_load=False)
    return same, any(not torch.equal(before[n], t) for n, t in weights(made).items())


console, sys.stdout = sys.stdout, sys.stderr  # where all other words go
sys.excepthook = lambda *e: print("COULD NOT RUN", e, file=console) or __import__("os")._exit(2)
with tempfile.TemporaryDirectory() as path, mp.get_context("fork").Pool(2) as pool:
    sizes = {"vocab_size": 8, "hidden_size": 32, "intermediate_size": 8, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(path)
    ((control, seen), _) = pool.starmap_async(scenario, [(0, path), (1, path)], 1).get(60)
word = ("REPRODUCED" if seen else "FIXED") if control else "COULD NOT RUN"
print(
    f"{word}: a damaged checkpoint is loaded into the weights ({control=}, {seen=})", file=console
)
sys.exit(int(seen) if control else 2)

"""verl 0.9.1, FSDP1 with fsdp_size > 1: eval_mode() before any forward ends in an AttributeError.

Its exit calls module._handle.reshard(True), but FSDP1 has no _local_shard before its first forward.
Control: FSDP2, and FSDP1 behind a forward, leave it without an error.
Exit: 0 fixed, 1 reproduced, 2 could not run.
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
from verl.utils.tensordict_utils import get_tensordict  # noqa: E402
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig  # noqa: E402
from verl.workers.engine.fsdp import FSDPEngineWithLMHead  # noqa: E402

PADDED, LOW = {"use_remove_padding": False}, {"param_dtype": "fp32", "reduce_dtype": "fp32"}
MODEL = PADDED | {"load_tokenizer": False, "override_config": {"attn_implementation": "eager"}}
loss = lambda model_output, **_: (-model_output["log_probs"].values().mean(), {})


def engine(path, **fields):
    config = FSDPEngineConfig(mixed_precision=LOW, use_torch_compile=False, **fields)
    model = HFModelConfig(path=path, **MODEL)
    made = FSDPEngineWithLMHead(model, config, FSDPOptimizerConfig(lr=0.1), CheckpointConfig())
    made.initialize()
    return made


def batch(seed, count=3):
    ids = torch.randint(8, (count, 5), generator=torch.Generator().manual_seed(seed))
    rows = {"input_ids": ids, "position_ids": torch.arange(5).repeat(count, 1)}
    rows = {k: torch.nested.as_nested_tensor(list(v), layout=torch.jagged) for k, v in rows.items()}
    rows |= {"loss_mask": torch.ones(count, 5), "temperature": torch.ones(count)}
    return get_tensordict(rows, {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1} | PADDED)


def error(made):
    try:
        with made.eval_mode():
            return None
    except AttributeError as raised:
        return str(raised)


def scenario(rank, path):
    dist.init_process_group("gloo", f"file://{path}/store", rank=rank, world_size=2)
    first = error(engine(path, strategy="fsdp", fsdp_size=2))
    trained = engine(path, strategy="fsdp", fsdp_size=2)
    with trained.train_mode():
        trained.forward_backward_batch(batch(rank), loss)
    return first, error(trained) or error(engine(path, strategy="fsdp2", fsdp_size=2))


console, sys.stdout = sys.stdout, sys.stderr  # where all other words go
sys.excepthook = lambda *e: print("COULD NOT RUN", e, file=console) or __import__("os")._exit(2)
with tempfile.TemporaryDirectory() as path, mp.get_context("fork").Pool(2) as pool:
    sizes = {"vocab_size": 8, "hidden_size": 32, "intermediate_size": 8, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(path)
    ((first, other), _) = pool.starmap_async(scenario, [(0, path), (1, path)], 1).get(60)
control, seen = other is None, first is not None
word = ("REPRODUCED" if seen else "FIXED") if control else "COULD NOT RUN"
print(f"{word}: eval_mode() before a forward: {first} ({control=}, {seen=})", file=console)
sys.exit(int(seen) if control else 2)

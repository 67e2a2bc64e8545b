"""verl 0.9.1, FSDP2, deferred sync: a batch that an exception ends spoils the next one.

The loss raises in the second of three micro-batches; the next gradient must not know of it.
Control: the same with eager sync. Exit: 0 fixed, 1 reproduced, 2 could not run.
"""

import sys
import tempfile
from contextlib import suppress

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


def batch(seed, count=3):
    ids = torch.randint(8, (count, 5), generator=torch.Generator().manual_seed(seed))
    rows = {"input_ids": ids, "position_ids": torch.arange(5).repeat(count, 1)}
    rows = {k: torch.nested.as_nested_tensor(list(v), layout=torch.jagged) for k, v in rows.items()}
    rows |= {"loss_mask": torch.ones(count, 5), "temperature": torch.ones(count)}
    return get_tensordict(rows, {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1} | PADDED)


def norm(path, rank, deferred, *losses):
    fields = {"strategy": "fsdp2", "use_no_sync_for_gradient_accumulation": deferred}
    config = FSDPEngineConfig(mixed_precision=LOW, use_torch_compile=False, **fields)
    model = HFModelConfig(path=path, **MODEL)
    made = FSDPEngineWithLMHead(model, config, FSDPOptimizerConfig(), CheckpointConfig())
    made.initialize()
    for function in losses:
        with suppress(TypeError), made.train_mode():
            made.forward_backward_batch(batch(rank), function)
            norm = made.optimizer_step()
    return norm


def scenario(rank, path):
    dist.init_process_group("gloo", f"file://{path}/store", rank=rank, world_size=2)
    same = []
    for deferred in (False, True):
        failing = lambda it=iter([loss, None]), **data: next(it)(**data)  # noqa: B008  in micro-batch 1
        same.append(norm(path, rank, deferred, failing, loss) == norm(path, rank, deferred, loss))
    return same[0], not same[1]


console, sys.stdout = sys.stdout, sys.stderr  # where all other words go
sys.excepthook = lambda *e: print("COULD NOT RUN", e, file=console) or __import__("os")._exit(2)
with tempfile.TemporaryDirectory() as path, mp.get_context("fork").Pool(2) as pool:
    sizes = {"vocab_size": 8, "hidden_size": 32, "intermediate_size": 8, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(path)
    ((control, seen), _) = pool.starmap_async(scenario, [(0, path), (1, path)], 1).get(60)
word = ("REPRODUCED" if seen else "FIXED") if control else "COULD NOT RUN"
print(
    f"{word}: what waits survives an exception and zero_grad under FSDP2 ({control=}, {seen=})",
    file=console,
)
sys.exit(int(seen) if control else 2)

"""Make the process that ranks are forked from ready on a machine that believes it has two GPUs.

With a wire across everything that would wake them. Prints what it found as one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch

_WIRED = (
    *("_cuda_init", "_cuda_getDeviceCount", "_cuda_setDevice", "_cuda_getDevice"),
    *("_cuda_exchangeDevice", "_cuda_maybeExchangeDevice", "_cuda_getCurrentRawStream"),
)


def _wire(name: str, woken: list[str]) -> Callable[..., NoReturn]:
    def wire(*_: object, **__: object) -> NoReturn:
        woken.append(name)
        raise AssertionError(f"{name} wakes CUDA")

    return wire


def main() -> None:
    """Believe, prepare, tell."""
    woken: list[str] = []
    cuda: Any = torch.cuda
    cuda._is_compiled = lambda: True
    cuda._device_count_nvml = lambda: 2
    cuda._lazy_init = _wire("_lazy_init", woken)
    for name in _WIRED:
        setattr(torch._C, name, _wire(name, woken))
    # Imported when all wires are there: libraries may ask for a GPU while they are imported.
    from fsdp_engine.world.zygote import prepare_all

    prepare_all("cuda")
    matmul = torch.backends.cuda.matmul
    found = {
        "woken": woken,
        "initialized": cuda.is_initialized(),
        "believes": [cuda.is_available(), cuda.device_count()],
        "deterministic": [
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ],
        "tf32": [matmul.allow_tf32, torch.backends.cudnn.allow_tf32],
        "reduced": [
            matmul.allow_fp16_reduced_precision_reduction,
            matmul.allow_bf16_reduced_precision_reduction,
        ],
        "workspace": os.environ["CUBLAS_WORKSPACE_CONFIG"],
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()

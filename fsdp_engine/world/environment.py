"""What the process that ranks are forked from is started with, by the device they compute on."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from fsdp_engine.world.device import ENVIRONMENTS

INSIDE = "FSDP_PROPERTIES_INSIDE"
"""Set in the environment of the process that forks ranks, and so in theirs."""

_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def environment(device: str) -> dict[str, str]:
    """What the process that forks ranks on a device is started with."""
    search_path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    return os.environ | {
        "PYTHONPATH": search_path,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        **_interface(),
        "TORCH_GLOO_LAZY_INIT": "1",  # ranks that never talk to each other do not connect
        INSIDE: "1",
        "TOKENIZERS_PARALLELISM": "false",
        **ENVIRONMENTS[device],
    }


def _interface() -> dict[str, str]:
    """The loopback, unless this is a job on several machines: there it is the user's or gloo's."""
    master = os.environ.get("MASTER_ADDR", "localhost")
    local = master in ("localhost", "127.0.0.1", "::1")
    return {"GLOO_SOCKET_IFNAME": _LOOPBACK} if local else {}

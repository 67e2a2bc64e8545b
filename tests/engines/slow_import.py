"""An engine whose import takes longer than a case may."""

from __future__ import annotations

import threading

from fsdp_engine.adapters.torch_fsdp import TorchFsdp2

IMPORT_TIME_S = 5.0

threading.Event().wait(IMPORT_TIME_S)


class Slow(TorchFsdp2):
    """Otherwise like plain FSDP2."""

"""verl's own FSDP engine as an engine under test. Nothing else of the project imports verl.

verl takes its platform from the environment while it is imported, so that is set here, before any
module of this package can import it.
"""

from __future__ import annotations

import os
import warnings

import torch

_SIMULATED = hasattr(torch, "hpu") and torch.hpu.is_available()

os.environ["VERL_PLATFORM"] = "hpu" if _SIMULATED else "cpu"
os.environ["VERL_USE_EXTERNAL_MODULES"] = f"{__name__}.platform"
os.environ.setdefault("VERL_LOGGING_LEVEL", "WARN")
warnings.filterwarnings("ignore", message=r"\w+ engine is not available")  # Megatron and its kind

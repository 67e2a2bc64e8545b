"""What a case may be: bounds on its numbers, and how a value outside of them is refused."""

from __future__ import annotations

import reprlib

from fsdp_engine.contract.errors import CaseError

MAX_WORLD_SIZE = 64
MAX_UNITS = 8
MAX_WIDTH = 2048
MAX_VOCAB = 1024
MAX_LENGTH = 256
MAX_SEQUENCES = 64
MAX_BATCHES = 8
MAX_ACTIONS = 16
MAX_NUM_TENSORS = 1024
MAX_NUMBER = 1e18


_SHORT = reprlib.Repr()
_SHORT.maxother = 160
_SHORT.maxstring = 80


def shortened(value: object) -> str:
    """A value from a file as text of bounded length, however large or deep it is."""
    return _SHORT.repr(value)


def require(condition: bool, field_name: str, value: object, legal: str) -> None:  # noqa: FBT001
    if not condition:
        raise CaseError(f"{field_name}: {shortened(value)} is not legal; {legal}")


def require_between(field_name: str, value: int, low: int, high: int) -> None:
    require(low <= value <= high, field_name, value, f"legal is {low} to {high}")

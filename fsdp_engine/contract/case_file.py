"""A case as text: canonical JSON, the id that follows from it, and reading it back."""

from __future__ import annotations

import hashlib
import json

from fsdp_engine.contract.case import Case
from fsdp_engine.contract.codec import decode, encode
from fsdp_engine.contract.errors import CaseError


def canonical_json(case: Case) -> str:
    """The case as one line of JSON with sorted keys; equal cases give equal text."""
    return json.dumps(encode(case), sort_keys=True, separators=(",", ":"), allow_nan=False)


def case_id(case: Case) -> str:
    """SHA-256 of the canonical JSON, in hexadecimal; engine and device are not part of it."""
    return hashlib.sha256(canonical_json(case).encode()).hexdigest()


MAX_CASE_BYTES = 1 << 20


def case_from_json(text: str) -> Case:
    """Read a case.

    Raises:
        CaseError: not JSON, too large, an unknown or missing field, a wrong type or an illegal
            value; the message names the field.
    """
    if len(text) > MAX_CASE_BYTES:
        raise CaseError(f"case file: {len(text)} characters; legal is at most {MAX_CASE_BYTES}")
    try:
        raw = json.loads(text, parse_constant=_refuse_constant)
    except CaseError:
        raise
    except (ValueError, RecursionError) as error:  # a number of too many digits is a ValueError
        raise CaseError(f"case file: not JSON ({error})") from error
    try:
        return decode(Case, raw, where="case")
    except RecursionError as error:
        raise CaseError("case file: nested too deeply") from error


def _refuse_constant(name: str) -> float:
    raise CaseError(f"case file: {name} is not a number; legal is a finite one")

"""All known failures of the engines; the reference engine has none.

Every engine has a file of its own below `properties/issues/`. What the words of an entry mean is
said in `properties.issues.issue`.
"""

from __future__ import annotations

from properties.issues import accelerate, torch_fsdp1, torch_fsdp2, verl
from properties.issues.issue import KnownIssue, fixed_issue, known_issue

__all__ = ["KNOWN_ISSUES", "KnownIssue", "fixed_issue", "known_issue"]

_OF_TORCH = (
    *torch_fsdp1.SHARED,
    *torch_fsdp2.SHARED,
    *torch_fsdp1.ON_DEVICE,
    *torch_fsdp2.ON_DEVICE,
)

KNOWN_ISSUES: tuple[KnownIssue, ...] = (
    *_OF_TORCH,
    *verl.OWN,
    *verl.inherited(_OF_TORCH),
    *accelerate.OWN,
)

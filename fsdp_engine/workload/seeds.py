"""Seeds derived from a case: one local generator per named thing, independent of all others."""

from __future__ import annotations

import hashlib

import torch


def generator(seed: int, *names: object) -> torch.Generator:
    """A generator whose stream depends on `seed` and the names only."""
    text = "/".join(map(str, (seed, *names)))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)

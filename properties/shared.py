"""Failures in a Redis that several machines share, each of which begins with what any has found."""

from __future__ import annotations

import functools
from typing import Any

from hypothesis.database import ExampleDatabase

SCHEMES = ("redis://", "rediss://", "unix://")
_PREFIX = "fsdp-properties"


@functools.cache
def connect(url: str) -> Any:
    """A client of the Redis at this address, which answers.

    Raises:
        ValueError: another kind of address, no package `redis`, or nobody answers.
    """
    if not url.startswith(SCHEMES):
        raise ValueError(f"not an address of a Redis; legal are {', '.join(SCHEMES)}...")
    try:
        import redis  # noqa: PLC0415  needed by nobody else
    except ImportError as error:
        raise ValueError("needs the package redis: pip install redis") from error
    client = redis.Redis.from_url(url)
    try:
        client.ping()
    except redis.RedisError as error:
        raise ValueError(f"nobody answers: {error}") from error
    return client


def failures(url: str, test: str) -> ExampleDatabase:
    """The failures of one test; those that nobody asks for in eight days are dropped."""
    client = connect(url)
    from hypothesis.extra.redis import RedisExampleDatabase  # noqa: PLC0415  imports redis

    return RedisExampleDatabase(client, key_prefix=f"{_PREFIX}:{test}:".encode())


def has_failures(url: str, test: str) -> bool:
    """Whether there is any failure of one test."""
    found = connect(url).scan_iter(match=f"{_PREFIX}:{test}:*")
    return next(iter(found), None) is not None

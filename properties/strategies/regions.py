"""Parts of the main axes that single suites are about."""

from __future__ import annotations

from properties.covering import OPTIONAL_KINDS, Axes

_FEW_RANKS = ("line2", "line3", "row", "column")
"""Meshes of two and three ranks."""

_LANGUAGE = ("llama", "qwen2", "mixtral")


def many_ranks(row: Axes) -> bool:
    """Worlds of two ranks and more."""
    return row.mesh != "single"


def is_small(row: Axes) -> bool:
    """Worlds of two and three ranks, and no language model: what is quick to run."""
    return row.mesh in _FEW_RANKS and row.kind not in _LANGUAGE


def replicated(row: Axes) -> bool:
    """Meshes with more than one replica."""
    return row.mesh in ("grid", "column", "wide_grid")


def deferring(row: Axes) -> bool:
    """Deferred sync on two ranks and more."""
    return row.sync == "deferred" and many_ranks(row)


def can_be_exact(row: Axes) -> bool:
    """Language models and adapters have no exact cases."""
    return row.adapter == "plain" and row.kind not in _LANGUAGE


def exactly_deferring(row: Axes) -> bool:
    """Deferred sync where cases can be exact."""
    return deferring(row) and can_be_exact(row)


def plain_on_many_ranks(row: Axes) -> bool:
    """No adapter: all parameters are the model's own."""
    return row.adapter == "plain" and many_ranks(row)


def can_have_adapter(row: Axes) -> bool:
    """Two ranks and more, and a model that an adapter can be put on.

    The language families, which take longest with one, are drawn for tied weights alone: to an
    adapter they are linear layers and an embedding.
    """
    return many_ranks(row) and row.kind in ("linear", "mlp", "embedding", "tied", "buffers")


def sometimes_used(row: Axes) -> bool:
    """Models with a part that only gated sequences use, on two ranks and more."""
    return row.kind in OPTIONAL_KINDS and many_ranks(row)


def with_predicted_bytes(row: Axes) -> bool:
    """Models of which every part is used and trained."""
    return row.adapter == "plain" and row.kind not in OPTIONAL_KINDS


def with_predicted_peaks(row: Axes) -> bool:
    """Of these the ones that are sharded, and in which no value decides what is computed."""
    sharded = row.mesh not in ("single", "column") and row.kind != "mixtral"
    return sharded and with_predicted_bytes(row)


def saved_on_many_ranks(row: Axes) -> bool:
    """Small models of every kind of parameter, on two ranks and more.

    How batches are split and gradients synchronised has no part in a checkpoint.
    """
    small = row.kind in ("linear", "mlp", "embedding", "tied", "frozen", "buffers")
    return small and (row.planning, row.sync) == ("static", "eager") and many_ranks(row)


def saved_on_few_ranks(row: Axes) -> bool:
    """Of these the worlds of two and three ranks."""
    return row.mesh in _FEW_RANKS and row.adapter == "plain" and saved_on_many_ranks(row)


def two_ranks(row: Axes) -> bool:
    """The smallest world of more than one rank, for what is the same on every mesh."""
    return row.mesh == "line2"

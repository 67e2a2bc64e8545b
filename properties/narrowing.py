"""Rows for an engine that has not all of the main axes: exchanged for rows that it has."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping

from properties.covering import FACTORS, Axes, is_possible


def within(rows: Iterable[Axes], lacks: Collection[Mapping[str, str]]) -> tuple[Axes, ...]:
    """The rows without those that an engine lacks: each is exchanged for one it has, if any.

    For that the values a lack names are changed, one axis at a time.
    """
    kept: dict[Axes, None] = {}
    for row in rows:
        nearest: Axes | None = row
        for lack in lacks:
            if nearest is not None and is_lacking(nearest, (lack,)):
                nearest = _nearest_within(nearest, lack, lacks)
        if nearest is not None and not is_lacking(nearest, lacks):
            kept[nearest] = None
    return tuple(kept)


def _nearest_within(
    row: Axes, lack: Mapping[str, str], lacks: Collection[Mapping[str, str]]
) -> Axes | None:
    others = [dataclasses.replace(row, **{axis: value}) for axis in lack for value in FACTORS[axis]]
    possible = [other for other in others if is_possible(other) and not is_lacking(other, (lack,))]
    return next((other for other in possible if not is_lacking(other, lacks)), None) or next(
        iter(possible), None
    )


def is_lacking(row: Axes, lacks: Collection[Mapping[str, str]]) -> bool:
    """Whether the row has all values of some combination that an engine lacks."""
    return any(lack.items() <= dict(row.items()).items() for lack in lacks)

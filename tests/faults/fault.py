"""What is known of a planted fault."""

from __future__ import annotations

from dataclasses import dataclass

from properties.covering import Axes


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One mistake.

    `engine` is its class by name, `kind` the class of mistakes it belongs to. `source` is a public
    bug of the same kind as `owner/repository#number`; `sensitivity` for an error chosen for its
    size, `textbook` for one that is too common to have a report of its own. Every property of
    `found_by` must find it by itself. `shows_in` are values of main axes, outside of which it
    cannot show; it says only where to look first. `device` is what ranks compute on.
    """

    engine: str
    kind: str
    source: str
    found_by: tuple[str, ...]
    shows_in: tuple[tuple[str, frozenset[str]], ...] = ()
    device: str = "cpu"

    @property
    def name(self) -> str:
        return self.engine.rpartition(":")[2]

    def can_show(self, row: Axes) -> bool:
        """Whether the row has the values without which there is nothing to see."""
        return all(getattr(row, axis) in values for axis, values in self.shows_in)


def fault(kind: str, engine: str, source: str, /, *found_by: str, **shows_in: str) -> Fault:
    """A fault of `tests.faults`; the values of `shows_in` are separated by spaces."""
    return Fault(
        engine=f"tests.faults.{engine}",
        kind=kind,
        source=source,
        found_by=found_by,
        shows_in=tuple((axis, frozenset(values.split())) for axis, values in shows_in.items()),
    )

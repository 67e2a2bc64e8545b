"""Cases that are listed rather than drawn."""

from __future__ import annotations

from fsdp_engine.contract.batch import Batch, Sequence
from fsdp_engine.contract.case import Case
from oracles.configuration import illegal_cases, probes


def one_case() -> tuple[Case, ...]:
    """The simplest case on two ranks, for questions that no case has a part in."""
    ranks = ((Sequence(key=0),), (Sequence(key=1, loss_tokens=2),))
    return (Case(batches=(Batch(ranks=ranks),)),)


def illegal_configurations() -> tuple[Case, ...]:
    """One case for every illegal value of a configuration field."""
    return tuple(item.case for item in illegal_cases())


def changed_cases() -> tuple[Case, ...]:
    """One case for every configuration field, set to another legal value."""
    return tuple(probe.changed for probe in probes())

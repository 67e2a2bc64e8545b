"""How the tests of the draws look for a case, and for the smallest one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from hypothesis import HealthCheck, Phase, settings
from hypothesis.strategies import SearchStrategy

from fsdp_engine.contract.case import Case
from properties.covering import Axes

Draw: TypeAlias = Callable[[Axes], SearchStrategy[Case]]
Feature: TypeAlias = Callable[[Case], bool]

SEARCH = settings(
    max_examples=5000,
    phases=(Phase.generate,),
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
SHRINK = settings(SEARCH, phases=(Phase.generate, Phase.shrink))


def kinds_of(case: Case) -> list[str]:
    """The kinds of the program's actions."""
    return [action.kind for action in case.program]

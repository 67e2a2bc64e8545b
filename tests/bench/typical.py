"""What the bench runs: one small case per size of world, judged by the main check."""

from __future__ import annotations

from fsdp_engine.contract.case import Case
from fsdp_engine.contract.model import Model
from properties.catalog import Check, load_check
from tests.small_cases import small_case

ENGINE = "torch_fsdp2"
"""Plain FSDP2, so that every line is about the same work as the bare loop."""

MODEL = Model(family="mlp", units=2, width=8, hidden=12, vocab=5)
"""Three units with the root, 6 parameters, 464 elements."""


def typical_case(world_size: int, policy: str = "fp32") -> Case:
    """Two micro-batches of one sequence on every rank, reduced eagerly."""
    return small_case(shape=(world_size,), model=MODEL, policy=policy)


def main_check() -> Check:
    """The check of gradient-matches-oracle."""
    return load_check("gradient-matches-oracle")

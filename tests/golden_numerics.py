"""The numerics every shipped adapter declares, as text: `python -m tests.golden_numerics NAME ...`.

The oracles believe what an engine declares and compute its allowance from it, so a declaration that
gets wider by mistake would excuse a fault. The lines are pinned in a file for each engine; a change
of an adapter shows there, line by line, and is looked at before it is written with this command.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from fsdp_engine.contract.case import DTYPE_POLICIES, Strategy
from fsdp_engine.contract.model import Model, OptionalPart
from fsdp_engine.contract.observation import Level, Numerics
from fsdp_engine.contract.protocol import Engine
from fsdp_engine.world.registry import BUILT_IN, OPTIONAL, load_engine
from tests.world_cases import world_case

FOLDER = Path(__file__).parent / "golden" / "numerics"
SHIPPED = (*BUILT_IN, *OPTIONAL)
MESHES = ((1,), (2,), (3,), (2, 2), (2, 1), (1, 2), (3, 1))
MIXED = "fp32/bf16/fp32"
PARTS: tuple[OptionalPart, ...] = ("parameter", "unit")
SHORT = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", None: "as they are"}


def path_of(name: str) -> Path:
    """The file that pins what this engine declares."""
    return FOLDER / f"{name}.txt"


def lines(name: str) -> Iterator[str]:
    """By strategy, mesh, dtype policy and sync mode; with optional parts on one mesh."""
    engine = load_engine(name)
    offered = engine.capabilities().strategies
    for strategy in (known for known in get_args(Strategy) if known in offered):
        for mesh, policy in itertools.product(MESHES, DTYPE_POLICIES):
            for deferred in (False, True):
                yield from _line(engine, strategy, mesh, policy, deferred=deferred)
        for part, deferred in itertools.product(PARTS, (False, True)):
            yield from _line(engine, strategy, (2,), MIXED, deferred=deferred, part=part)


def _line(
    engine: Engine,
    strategy: Strategy,
    mesh: tuple[int, ...],
    policy: str,
    *,
    deferred: bool,
    part: OptionalPart = "none",
) -> Iterator[str]:
    case = world_case(
        strategy,
        mesh=mesh,
        dtypes=DTYPE_POLICIES[policy],
        model=Model(units=2, optional=part),
        deferred=deferred,
    )
    if engine.supports(case) is not None:
        return
    of = "x".join(map(str, mesh))
    sync = "deferred" if deferred else "eager"
    words = [strategy, of, policy, sync]
    words += [f"optional {part}"] if part != "none" else []
    yield f"{' '.join(words)}: {told(engine.numerics(case))}"


def told(numerics: Numerics) -> str:
    """Everything declared but the units, which follow from the model."""
    dtypes = "/".join(SHORT[d] for d in (numerics.storage, numerics.compute, numerics.reduce))
    words = [
        f"{'deferred' if numerics.deferred else 'eager'} {dtypes}",
        f"local sums {SHORT[numerics.local_accumulate]}",
        f"shard sums {SHORT[numerics.shard_accumulate]}",
        f"norm {SHORT[numerics.norm]}",
        ", ".join(map(_level, numerics.levels)) or "no reduction",
        f"buffers {SHORT[numerics.buffers]}",
        f"inputs {'cast' if numerics.input_cast else 'as they are'}",
        *([f"autocast {SHORT[numerics.autocast]}"] if numerics.autocast else []),
        numerics.semantics or "own semantics",
        "replayable" if numerics.replayable else "not replayable",
    ]
    return "; ".join(words)


def _level(level: Level) -> str:
    before = f" /{level.before:g}" if level.before != 1.0 else ""
    after = f" /{level.after:g}" if level.after != 1.0 else ""
    return f"{level.axis}{before} sum of {level.size}{after}"


if __name__ == "__main__":
    for shipped in sys.argv[1:] or SHIPPED:
        path_of(shipped).write_text("\n".join(lines(shipped)) + "\n")

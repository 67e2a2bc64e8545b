"""The main axes of the space of cases and the arrays of rows that cover their combinations.

A row fixes one value on every axis; the strategies draw the rest of a case. Which rows are
possible is written down once, in `CONSTRAINTS`; a pair of values is feasible if some possible row
has both. `axes_of` goes the other way: the row a case lies in.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import covertable

from fsdp_engine.contract.case import DTYPE_POLICIES, Case, Mesh
from fsdp_engine.contract.model import Model

Combination: TypeAlias = tuple[tuple[str, str], ...]
RowFilter: TypeAlias = "Callable[[Axes], bool]"

T = TypeVar("T")

OPTIONAL_KINDS = ("optional_parameter", "optional_unit")
KINDS_OF_MODEL = (
    "linear", "mlp", "embedding", "tied", "frozen", "buffers", *OPTIONAL_KINDS,
    "llama", "qwen2", "mixtral",
)  # fmt: skip

FACTORS: dict[str, tuple[str, ...]] = {
    "strategy": ("fsdp2", "fsdp1"),
    "reshard": ("zero3", "zero2"),
    "sync": ("eager", "deferred"),
    "mesh": ("line2", "line3", "line4", "grid", "column", "row", "single"),
    "dtypes": tuple(DTYPE_POLICIES),
    "kind": KINDS_OF_MODEL,
    "adapter": ("plain", "lora"),
    "planning": ("static", "token_budget"),
}
"""The values of each axis, the simplest first."""

WIDE_MESHES = ("wide_line", "wide_grid")
"""Meshes of five to eight ranks, only where the profile allows them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """One value on every main axis."""

    strategy: str = "fsdp2"
    reshard: str = "zero3"
    sync: str = "eager"
    mesh: str = "line2"
    dtypes: str = "fp32"
    kind: str = "linear"
    adapter: str = "plain"
    planning: str = "static"

    def __str__(self) -> str:
        return "-".join(value for _, value in self.items())

    def items(self) -> tuple[tuple[str, str], ...]:
        return tuple((name, getattr(self, name)) for name in FACTORS)

    @staticmethod
    def of(values: tuple[str, ...]) -> Axes:
        """The row with the values in the order of the axes."""
        return Axes(**dict(zip(FACTORS, values, strict=True)))

    def combinations(self, strength: int) -> frozenset[Combination]:
        """Every `strength` values of the row, each with its axis."""
        return frozenset(itertools.combinations(self.items(), strength))


def _excludes(axis: str, value: str, other: str, *others: str) -> dict[str, Any]:
    """`axis` = `value` goes with none of `others` on the axis `other`."""
    apart = {
        "operator": "not",
        "condition": {"operator": "in", "left": other, "values": list(others)},
    }
    return {
        "operator": "or",
        "conditions": [{"operator": "ne", "left": axis, "value": value}, apart],
    }


CONSTRAINTS: tuple[dict[str, Any], ...] = (
    # An adapter freezes the base itself, and has no place beside gated parts.
    _excludes("adapter", "lora", "kind", "frozen", *OPTIONAL_KINDS),
    # A planner that sorts by tokens cannot keep gated sequences in one micro-batch on all ranks.
    _excludes("planning", "token_budget", "kind", *OPTIONAL_KINDS),
)


def factors(*, max_world_size: int) -> dict[str, tuple[str, ...]]:
    """The axes of a profile: wider meshes where more than four ranks are allowed."""
    meshes = FACTORS["mesh"] + (WIDE_MESHES if max_world_size > 4 else ())
    return FACTORS | {"mesh": meshes}


@functools.cache
def covering_array(*, strength: int, max_world_size: int) -> tuple[Axes, ...]:
    """Possible rows that have every feasible combination of `strength` values; always the same."""
    axes = factors(max_world_size=max_world_size)
    rows = covertable.make(
        {name: list(values) for name, values in axes.items()},
        strength=strength,
        constraints=list(CONSTRAINTS),
    )
    return _balanced([Axes(**row) for row in rows], axes, strength=strength)


def _balanced(
    rows: list[Axes], axes: dict[str, tuple[str, ...]], *, strength: int
) -> tuple[Axes, ...]:
    """The rows with values exchanged wherever pairs become more even and no combination is lost.

    Where a row is free to choose, the array has the simplest value: without this most of its rows
    would be eager FSDP2 with ZeRO-3, and every other choice on these axes would come with one
    single choice on the others. Adapters stay rare: with one, only its own small weights are
    trained.
    """
    combinations = Counter(part for row in rows for part in row.combinations(strength))
    pairs = Counter(part for row in rows for part in row.combinations(2))
    balanced = list(rows)
    for _ in range(_PASSES):
        for index, row in enumerate(balanced):
            for name in axes:
                if name == "adapter":
                    continue
                others = [dataclasses.replace(row, **{name: value}) for value in axes[name]]
                row = min(
                    (other for other in others if _may_replace(row, other, combinations, strength)),
                    key=functools.partial(_crowding, row, pairs, axes),
                )
                before = balanced[index]
                combinations.subtract(before.combinations(strength))
                combinations.update(row.combinations(strength))
                pairs.subtract(before.combinations(2))
                pairs.update(row.combinations(2))
                balanced[index] = row
    return tuple(balanced)


_PASSES = 4
"""More change next to nothing."""


def _may_replace(row: Axes, other: Axes, combinations: Counter[Combination], strength: int) -> bool:
    """Whether the array has `other` instead of `row` without losing a combination."""
    lost = row.combinations(strength) - other.combinations(strength)
    return is_possible(other) and all(combinations[part] > 1 for part in lost)


def _crowding(
    row: Axes, pairs: Counter[Combination], axes: dict[str, tuple[str, ...]], other: Axes
) -> float:
    """How much more often than evenly the pairs that `other` brings in are there already.

    `row` is in the array now, and is to go.
    """
    own = row.combinations(2)
    return sum(
        (pairs[pair] - (pair in own)) * len(axes[pair[0][0]]) * len(axes[pair[1][0]])
        for pair in other.combinations(2)
    )


@functools.cache
def feasible_pairs(*, max_world_size: int) -> frozenset[Combination]:
    """The pairs of values some possible row has, found without the covering array."""
    axes = factors(max_world_size=max_world_size)
    pairs: set[Combination] = set()
    for first, second in itertools.combinations(axes, 2):
        for left, right in itertools.product(axes[first], axes[second]):
            if _completes({first: left, second: right}, axes):
                pairs.add(((first, left), (second, right)))
    return frozenset(pairs)


def is_possible(row: Axes) -> bool:
    """Whether the row keeps every constraint."""
    values = dict(row.items())
    return all(_holds(constraint, values) for constraint in CONSTRAINTS)


def _completes(fixed: dict[str, str], axes: dict[str, tuple[str, ...]]) -> bool:
    """Whether a possible row has the fixed values; only axes that a rule names are tried."""
    named = {"adapter", "kind", "planning"}
    free = [name for name in axes if name in named and name not in fixed]
    for chosen in itertools.product(*(axes[name] for name in free)):
        values = {name: options[0] for name, options in axes.items()}
        values |= fixed | dict(zip(free, chosen, strict=True))
        if is_possible(Axes(**values)):
            return True
    return False


def _holds(condition: dict[str, Any], values: dict[str, str]) -> bool:
    match condition["operator"]:
        case "or":
            return any(_holds(part, values) for part in condition["conditions"])
        case "not":
            return not _holds(condition["condition"], values)
        case "ne":
            return bool(values[condition["left"]] != condition["value"])
        case "in":
            return values[condition["left"]] in condition["values"]
        case operator:
            raise AssertionError(operator)


def axes_of(case: Case) -> Axes | None:
    """The row a case lies in; None where it is outside the space, so that it covers nothing."""
    dtypes = {policy: name for name, policy in DTYPE_POLICIES.items()}.get(case.dtypes)
    if dtypes is None or case.engine.overrides:
        return None
    row = Axes(
        strategy=case.engine.strategy,
        reshard="zero3" if case.engine.reshard_after_forward else "zero2",
        sync="deferred" if case.engine.deferred else "eager",
        mesh=_mesh_name(case.mesh),
        dtypes=dtypes,
        kind=_kind_of(case.model),
        adapter="lora" if case.model.lora_rank else "plain",
        planning=case.engine.planning.kind,
    )
    return row if is_possible(row) else None


def _mesh_name(mesh: Mesh) -> str:
    if mesh.world_size == 1:
        return "single"
    if mesh.world_size > 4:
        return "wide_line" if mesh.ndim == 1 else "wide_grid"
    if mesh.ndim == 1:
        return f"line{mesh.world_size}"
    if mesh.shards == 1:
        return "column"
    return "row" if mesh.replicas == 1 else "grid"


def _kind_of(model: Model) -> str:
    """The first of these features the model has; its family where it has none."""
    if model.optional != "none":
        return "optional_unit" if model.optional == "unit" else "optional_parameter"
    if model.frozen != "none":
        return "frozen"
    if model.tied:
        return "tied"
    return "buffers" if model.buffers else model.family


def spread(items: Iterable[T], *, count: int) -> tuple[T, ...]:
    """At most `count` of the items, evenly spread over their order."""
    chosen = tuple(items)
    if len(chosen) <= count:
        return chosen
    return tuple(chosen[index * len(chosen) // count] for index in range(count))


def varied(rows: Sequence[Axes], *, count: int, start: int = 0) -> tuple[Axes, ...]:
    """At most `count` of the rows: each next one has the most values, then pairs, not yet seen.

    Among equals the first from `start` on is taken, so another start gives another choice.
    """
    turn = start % max(len(rows), 1)
    left = [(row, set(row.items()), row.combinations(2)) for row in (*rows[turn:], *rows[:turn])]
    chosen: list[Axes] = []
    values: set[tuple[str, str]] = set()
    pairs: set[Combination] = set()
    while left and len(chosen) < count:
        best = max(left, key=lambda item: (len(item[1] - values), len(item[2] - pairs)))
        left.remove(best)
        chosen.append(best[0])
        values |= best[1]
        pairs |= best[2]
    return tuple(chosen)


def pairs_judged(rows: Iterable[Axes], *, max_world_size: int) -> frozenset[Combination]:
    """The feasible pairs the rows of judged cases cover."""
    covered: set[Combination] = set()
    for row in set(rows):
        covered |= row.combinations(2)
    return frozenset(covered) & feasible_pairs(max_world_size=max_world_size)


assert [field.name for field in dataclasses.fields(Axes)] == list(FACTORS)

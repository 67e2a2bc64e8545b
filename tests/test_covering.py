"""The covering arrays hold every feasible combination and nothing impossible."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given

from fsdp_engine.contract.case import Case, DtypePolicy, Mesh
from properties.covering import (
    CONSTRAINTS,
    FACTORS,
    Axes,
    axes_of,
    covering_array,
    factors,
    feasible_pairs,
    is_possible,
    pairs_judged,
    spread,
    varied,
)
from properties.narrowing import within
from properties.profiles import PROFILES, Profile
from properties.strategies.cases import any_cases
from properties.strategies.tables import one_case


@pytest.mark.parametrize("profile", PROFILES.values(), ids=lambda profile: profile.name)
def test_rows_cover_every_feasible_pair(profile: Profile) -> None:
    size = profile.max_world_size
    rows = covering_array(strength=profile.strength, max_world_size=size)
    assert all(map(is_possible, rows))
    assert pairs_judged(rows, max_world_size=size) == feasible_pairs(max_world_size=size)


def test_feasible_pairs_are_those_of_all_possible_rows() -> None:
    """By brute force over the whole product, once."""
    axes = factors(max_world_size=4)
    # Only three axes appear in rules: the product of the others adds nothing new.
    named = ("kind", "adapter", "planning")
    possible = [
        dict(zip(named, values, strict=True))
        for values in itertools.product(*(axes[name] for name in named))
        if is_possible(Axes(**dict(zip(named, values, strict=True))))
    ]
    wanted = set()
    for (first, lefts), (second, rights) in itertools.combinations(axes.items(), 2):
        for left, right in itertools.product(lefts, rights):
            fixed = {first: left, second: right}
            if any(all(row.get(k, v) == v for k, v in fixed.items()) for row in possible):
                wanted.add(((first, left), (second, right)))
    assert feasible_pairs(max_world_size=4) == wanted


def test_all_triples_at_night() -> None:
    rows = covering_array(strength=3, max_world_size=8)
    seen = {triple for row in rows for triple in itertools.combinations(row.items(), 3)}
    axes = factors(max_world_size=8)
    for names in itertools.combinations(axes, 3):
        for values in itertools.product(*(axes[name] for name in names)):
            fixed = dict(zip(names, values, strict=True))
            simplest = {name: options[0] for name, options in axes.items()}
            # The simplest values of the free axes break no rule.
            if is_possible(Axes(**(simplest | fixed))):
                assert tuple((n, fixed[n]) for n in names) in seen


@pytest.mark.parametrize("profile", PROFILES.values(), ids=lambda profile: profile.name)
def test_no_value_of_an_axis_prevails(profile: Profile) -> None:
    rows = covering_array(strength=profile.strength, max_world_size=profile.max_world_size)
    for name, values in factors(max_world_size=profile.max_world_size).items():
        usage = [sum(getattr(row, name) == value for row in rows) for value in values]
        assert name == "adapter" or max(usage) - min(usage) <= len(rows) // 10


def test_the_array_is_the_same_every_time() -> None:
    first = covering_array(strength=2, max_world_size=4)
    covering_array.cache_clear()
    assert covering_array(strength=2, max_world_size=4) == first


def test_every_rule_excludes_something() -> None:
    product = [Axes(kind=k, adapter=a, planning=p) for k, a, p in itertools.product(
        FACTORS["kind"], FACTORS["adapter"], FACTORS["planning"])]  # fmt: skip
    assert len(CONSTRAINTS) == 2
    assert sum(not is_possible(row) for row in product) == 3 * 2 + 2 * 2 - 2


@given(case=any_cases(max_world_size=8))
def test_every_drawn_case_lies_in_a_possible_row(case: Case) -> None:
    row = axes_of(case)
    assert row is not None
    assert is_possible(row)
    assert (row.mesh == "single") == (case.mesh.world_size == 1)


def test_cases_outside_the_axes_cover_nothing() -> None:
    (case,) = one_case()
    odd = Case(batches=case.batches, dtypes=DtypePolicy(compute="float16"))
    assert axes_of(odd) is None
    assert axes_of(case) == Axes()
    assert axes_of(Case(batches=case.batches, mesh=Mesh(shape=(2, 1)))) == Axes(mesh="column")


def test_spread_keeps_the_order_and_the_ends_apart() -> None:
    assert spread(range(10), count=3) == (0, 3, 6)
    assert spread(range(2), count=3) == (0, 1)


def test_a_few_varied_rows_have_every_value_from_any_start() -> None:
    array = covering_array(strength=2, max_world_size=4)
    count = PROFILES["default"].rows
    choices = [varied(array, count=count, start=start) for start in range(0, len(array), 7)]
    for chosen in choices:
        for name, values in factors(max_world_size=4).items():
            assert {getattr(row, name) for row in chosen} == set(values)
    assert len(set(choices)) == len(choices)
    assert varied(array[:2], count=5, start=3) == (array[1], array[0])
    assert varied((), count=5, start=3) == ()


def test_engine_options_are_combined_evenly() -> None:
    """Otherwise two-valued axes could go hand in hand: all FSDP1 deferred, all FSDP2 eager."""
    rows = covering_array(strength=2, max_world_size=4)
    axes = ("strategy", "reshard", "sync", "planning")
    for first, second in itertools.combinations(axes, 2):
        for values in itertools.product(FACTORS[first], FACTORS[second]):
            usage = sum((getattr(row, first), getattr(row, second)) == values for row in rows)
            assert usage >= len(rows) // 5


def test_rows_that_an_engine_lacks_are_exchanged_for_what_it_has() -> None:
    rows = covering_array(strength=2, max_world_size=4)
    lacks = ({"strategy": "fsdp1", "mesh": "grid"}, {"mesh": "column"}, {"sync": "eager"})
    kept = within(rows, lacks)
    assert all(map(is_possible, kept))
    assert len(set(kept)) == len(kept)
    for row in kept:
        assert row.sync == "deferred"
        assert row.mesh != "column"
        assert (row.strategy, row.mesh) != ("fsdp1", "grid")
    assert {row.mesh for row in kept} == set(FACTORS["mesh"]) - {"column"}
    assert within(rows, ()) == tuple(dict.fromkeys(rows))
    everything = tuple({"mesh": mesh} for mesh in FACTORS["mesh"])
    assert within(rows, everything) == ()

"""The configuration's tables, and that wrong defaults, let-throughs and idle fields are found."""

from __future__ import annotations

import dataclasses

import pytest

from fsdp_engine.contract.case import Case, Scalar
from fsdp_engine.contract.errors import EngineRaised, UnsupportedCase
from fsdp_engine.contract.observation import Observation, Record, TrainRecord
from oracles.configuration import base_of, illegal_cases, probes
from properties.checks import configuration
from tests.observed import Answers, everywhere, observed, worked_case

CASE = worked_case()
DEFAULTS: dict[str, dict[str, Scalar]] = {
    "dataclass": {"lr": 1e-3, "fsdp_size": -1, "forward_prefetch": False},
    "yaml": {"lr": 1e-3, "fsdp_size": -1, "forward_prefetch": False},
}


def refused(kinds: dict[int, str], num_collectives: int = 0) -> EngineRaised:
    return EngineRaised(
        "refused",
        by_rank=dict.fromkeys(kinds, ""),
        kinds=kinds,
        num_collectives=dict.fromkeys(kinds, num_collectives),
    )


def changed(case: Case) -> Observation:
    """Another loss for every set of overrides."""

    def louder(record: Record) -> Record:
        assert isinstance(record, TrainRecord)
        return dataclasses.replace(record, total_loss=float(hash(case.engine.overrides) % 1009))

    return everywhere(observed(worked_case()), 0, louder)


def test_equal_entry_points_pass() -> None:
    assert configuration.entry_points_agree(CASE, Answers(defaults=DEFAULTS)).passed


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({**DEFAULTS["yaml"], "lr": 1e-6}, "default of lr in yaml: got 1e-06, should be 0.001"),
        ({**DEFAULTS["yaml"], "lr": None}, "default of lr in yaml: got None"),
        ({**DEFAULTS["yaml"], "fsdp_size": -1.0}, "default of fsdp_size in yaml: got -1.0"),
        ({"lr": 1e-3, "fsdp_size": -1}, "default of forward_prefetch in yaml: got no such field"),
        ({**DEFAULTS["yaml"], "qat": 1}, "default of qat in yaml: got 1, should be no such field"),
    ],
)
def test_entry_points_that_differ_are_found(fields: dict[str, Scalar], sentence: str) -> None:
    run = Answers(defaults={**DEFAULTS, "yaml": fields})
    verdict = configuration.entry_points_agree(CASE, run)
    assert str(verdict.mismatches[0]).startswith(sentence)


def test_without_declared_defaults_nothing_is_judged() -> None:
    for check in (
        configuration.entry_points_agree,
        configuration.every_field_is_probed,
        configuration.illegal_is_refused,
        configuration.field_is_observable,
    ):
        assert check(CASE, Answers()).outcome == "not_applicable"


def test_every_pair_of_the_table_differs_and_is_legal_data() -> None:
    assert all(probe.base != probe.changed for probe in probes())
    assert all(base_of(probe.changed) == probe.base for probe in probes())
    assert len({illegal.case for illegal in illegal_cases()}) == len(illegal_cases())


def test_a_field_without_a_probe_is_found() -> None:
    run = Answers(defaults={"dataclass": {"lr": 1e-3, "grad_offload": False}})
    verdict = configuration.every_field_is_probed(CASE, run)
    assert str(verdict.mismatches[0]) == (
        "field grad_offload: got no observable, should be a case where it matters"
    )


def test_an_idle_field_is_found() -> None:
    run = Answers(defaults=DEFAULTS, observe=lambda _: observed(worked_case()))
    verdict = configuration.field_is_observable(CASE, run)
    named = {mismatch.where for mismatch in verdict.mismatches}
    assert named == {
        "overrides lr=0.25",
        "overrides fsdp_size=1",
        "overrides forward_prefetch=True",
    }


def test_a_field_that_shows_or_is_refused_passes() -> None:
    assert configuration.field_is_observable(
        CASE, Answers(defaults=DEFAULTS, observe=changed)
    ).passed

    def observe(case: Case) -> Observation:
        if case.engine.overrides:
            raise refused({0: "ConfigError", 1: "ConfigError"})
        return observed(worked_case())

    run = Answers(defaults=DEFAULTS, observe=observe)
    assert configuration.field_is_observable(CASE, run).passed


@pytest.mark.parametrize(
    "kinds", [{0: "RuntimeError", 1: "RuntimeError"}, {0: "ConfigError"}], ids=str
)
def test_another_error_is_no_refusal(kinds: dict[int, str]) -> None:
    probe = next(probe for probe in probes() if probe.field == "lr")

    def observe(case: Case) -> Observation:
        if case == probe.changed:
            raise refused(kinds)
        return observed(worked_case())

    run = Answers(defaults=DEFAULTS, observe=observe)
    assert configuration.field_is_observable(probe.changed, run).outcome == "fail"


ILLEGAL = illegal_cases()[0].case


def outcome(error: Exception | None) -> str:
    def observe(_: Case) -> Observation:
        if error is not None:
            raise error
        return observed(worked_case())

    run = Answers(defaults=DEFAULTS, observe=observe)
    return configuration.illegal_is_refused(ILLEGAL, run).outcome


def test_illegal_values_are_refused_by_all_ranks_before_any_collective() -> None:
    both = {0: "ConfigError", 1: "ConfigError"}
    assert outcome(refused(both)) == "pass"
    assert outcome(refused(both, num_collectives=1)) == "fail"
    assert outcome(refused({0: "ConfigError"})) == "fail"
    assert outcome(refused({0: "ConfigError", 1: "TypeError"})) == "fail"
    assert outcome(None) == "fail"
    assert outcome(UnsupportedCase("not offered")) == "not_applicable"


def test_the_whole_table_of_illegal_values_is_judged_without_overrides() -> None:
    run = Answers(defaults=DEFAULTS, observe=lambda _: observed(worked_case()))
    verdict = configuration.illegal_is_refused(CASE, run)
    fields = {"lr", "fsdp_size", "forward_prefetch", "no_such_field"}
    expected = [illegal for illegal in illegal_cases() if illegal.field in fields]
    assert len(verdict.mismatches) == len(expected) > 3

"""The engine's configuration: one set of defaults, no illegal value let through, no idle field."""

from __future__ import annotations

from fsdp_engine.contract.case import Case
from fsdp_engine.contract.errors import EngineRaised, UnsupportedCase
from fsdp_engine.contract.protocol import Run
from oracles.configuration import (
    SHOWS_ON_DEVICE,
    UNKNOWN,
    base_of,
    default_mismatches,
    illegal_cases,
    probes,
    unprobed,
)
from oracles.verdict import Mismatch, Verdict, combine, exactly, not_applicable

_REFUSAL = "ConfigError"
# An operation that the configuration excludes, named when it is asked for.
_EXCLUSION = "EngineStateError"


def entry_points_agree(case: Case, run: Run) -> Verdict:  # noqa: ARG001  a table for all cases
    """All entry points have the same fields with the same defaults.

    Not applicable to an engine with fewer than two entry points.
    """
    defaults = run.tables().defaults
    if len(defaults) < 2:
        return not_applicable("the engine declares fewer than two entry points")
    return exactly(default_mismatches(defaults))


def every_field_is_probed(case: Case, run: Run) -> Verdict:  # noqa: ARG001  a table for all cases
    """Each field that an entry point lists has a case in which it must matter."""
    defaults = run.tables().defaults
    if not defaults:
        return not_applicable("the engine declares no configuration")
    return exactly(
        [
            Mismatch(where=f"field {field}", got="no observable", wanted="a case where it matters")
            for field in unprobed(defaults)
        ]
    )


def illegal_is_refused(case: Case, run: Run) -> Verdict:
    """A configuration with an illegal value is refused by ConfigError before any collective.

    On every rank. `case` is one of `oracles.configuration.illegal_cases`, or any other with illegal
    overrides; without overrides the whole table is judged, as far as the engine has the fields.
    """
    defaults = run.tables().defaults
    if not defaults:
        return not_applicable("the engine declares no configuration")
    if case.engine.overrides:
        return _refusal_verdict(case, run)
    fields = {field for entry in defaults.values() for field in entry} | {UNKNOWN}
    return combine(
        *(_refusal_verdict(item.case, run) for item in illegal_cases() if item.field in fields)
    )


def field_is_observable(case: Case, run: Run) -> Verdict:
    """A field set to another legal value shows, or is refused.

    `case` is the changed case of one of `oracles.configuration.probes`, or any other with
    overrides, then compared with the same without. Without overrides the whole table is judged, as
    far as the engine has the fields, and each of them must be in it.
    """
    defaults = run.tables().defaults
    if not defaults:
        return not_applicable("the engine declares no configuration")
    if case.engine.overrides:
        return _change_verdict(base_of(case), case, run)
    fields = {field for entry in defaults.values() for field in entry}
    verdicts = [
        _change_verdict(probe.base, probe.changed, run)
        for probe in probes()
        if probe.field in fields
    ]
    return combine(every_field_is_probed(case, run), *verdicts)


def _refusal_verdict(case: Case, run: Run) -> Verdict:
    where = f"overrides {_told(case)}"
    wanted = f"{_REFUSAL} on every rank before any collective"
    try:
        run(case)
    except UnsupportedCase as error:
        return not_applicable(str(error))
    except EngineRaised as error:
        mismatches = []
        for rank in range(case.mesh.world_size):
            kind = error.kinds.get(rank, "nothing raised")
            issued = error.num_collectives.get(rank, 0)
            if kind != _REFUSAL or issued:
                got = f"{kind} after {issued} collectives"
                mismatches.append(Mismatch(where=f"{where} rank {rank}", got=got, wanted=wanted))
        return exactly(mismatches)
    return exactly([Mismatch(where=where, got="a run", wanted=wanted)])


def _change_verdict(base: Case, changed: Case, run: Run) -> Verdict:
    try:
        before = run(base)
    except UnsupportedCase as error:
        return not_applicable(str(error))
    except EngineRaised as error:
        return exactly([_idle(changed, f"a base case that raises {sorted(error.kinds.items())}")])
    try:
        after = run(changed)
    except UnsupportedCase as error:
        return not_applicable(str(error))
    except EngineRaised as error:
        kinds = set(error.kinds.values())
        if kinds <= {_REFUSAL, _EXCLUSION} and len(error.kinds) == changed.mesh.world_size:
            return exactly([])
        got = f"{', '.join(sorted(kinds))} on ranks {sorted(error.kinds)}"
        return exactly([_idle(changed, got)])
    if before.ranks == after.ranks:
        return _same_verdict(base, changed, device=before.ranks[0].device)
    if run(base).ranks != before.ranks:
        return exactly([_idle(changed, "a base case that differs from itself")])
    return exactly([])


def _same_verdict(base: Case, changed: Case, *, device: str) -> Verdict:
    fields = {name for name, _ in changed.engine.overrides}
    if device == "cpu" and fields & {*SHOWS_ON_DEVICE}:
        return not_applicable("where the host is the device there is no other place")
    return exactly([_idle(changed, f"the same as with {_told(base)}")])


def _idle(changed: Case, got: str) -> Mismatch:
    where = f"overrides {_told(changed)}"
    return Mismatch(where=where, got=got, wanted=f"another observable, or {_REFUSAL}")


def _told(case: Case) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in case.engine.overrides) or "none"

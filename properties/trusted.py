"""What is shown of a failure: its simplest case, and a script that was seen to show it.

The case a search ends at is simplified further (`minimise`), written down, and made into a script
with torch and the engine alone where there are words for it, else into one that uses this project.
A script is run before it is shown, and what came of it is said.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from fsdp_engine.contract.case import Case
from fsdp_engine.contract.errors import FsdpPropertiesError
from oracles.verdict import Verdict
from properties.minimise import MAX_SECONDS, Minimised, Seen, minimise
from properties.outcome import Ending, Worlds
from properties.proof import prove
from properties.repro import write_repro
from properties.scripts.native import (
    TORCH_ENGINES,
    Setting,
    Shown,
    beyond,
    has_control,
    native_script,
    same_words,
)

MAX_TRUSTED = 8
"""Failures of one process whose scripts are run: each takes seconds."""

Look = Callable[[Case], Ending | None]
"""How a case ends in a warm world; None where that is refused or known."""


@dataclass(slots=True)
class Rations:
    """Which failures of this process were made into scripts that were run."""

    done: set[tuple[str, str]] = field(default_factory=set)

    def take(self, name: str, how: str) -> bool:
        """Whether there is one left for this property and this way to fail."""
        if (name, how) in self.done or len(self.done) >= MAX_TRUSTED:
            return False
        self.done.add((name, how))
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Trusted:
    """The simplest case, how it ended, its file, and a line on the script beside it."""

    case: Case
    verdict: Verdict
    path: Path
    script: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A case that fails, and where: `name` is the property's, `how` the way it ended."""

    case: Case
    name: str
    ending: Ending
    engine: str
    device: str
    folder: Path


def trusted(failure: Failure, look: Look, worlds: Worlds) -> Trusted:
    """Simplify, write, run. Costs seconds; a hang is not simplified, for each costs a deadline."""

    def seen(case: Case) -> Seen:
        ending = look(case)
        if ending is None:
            return "otherwise"
        if ending.verdict.outcome == "pass":
            return "passes"
        return "fails" if _alike(ending, failure.ending) else "otherwise"

    seconds = 0.0 if failure.ending.how == "Hung" else MAX_SECONDS
    found = minimise(failure.case, seen, max_seconds=seconds)
    ending = failure.ending if found.case == failure.case else look(found.case)
    if ending is None or not _alike(ending, failure.ending):
        found, ending = minimise(failure.case, seen, max_seconds=0.0), failure.ending
    path = write_repro(
        failure.folder,
        found.case,
        property_id=failure.name,
        engine=failure.engine,
        device=failure.device,
    )
    return Trusted(
        case=found.case,
        verdict=ending.verdict,
        path=path,
        script=_script(failure, found, ending, worlds, path.with_suffix(".py")),
    )


def _alike(ending: Ending, other: Ending) -> bool:
    """Whether two cases end in the same way."""
    return (ending.how, ending.verdict.outcome) == (other.how, other.verdict.outcome)


def _script(
    failure: Failure, found: Minimised, ending: Ending, worlds: Worlds, script: Path
) -> str:
    """Write the script that shows the failure, and one line that says what came of running it."""
    own = script.read_text(encoding="utf-8")
    shown = _shown(failure, found, ending, worlds)
    text = None if shown is None else native_script(shown, name=script.name)
    if shown is not None and text is not None:
        script.write_text(text, encoding="utf-8")
        proof = prove(script, has_control=has_control(text))
        if proof.holds:
            needs = "torch alone" if shown.family in TORCH_ENGINES else "torch and the engine alone"
            return f"script: {script} ({needs}; {proof})\n  it prints: {proof.line}"
        script.write_text(own, encoding="utf-8")
    return f"script: {script} (it needs this project; {prove(script, has_control=False)})"


def _shown(failure: Failure, found: Minimised, ending: Ending, worlds: Worlds) -> Shown | None:
    """What a script with torch and the engine alone has to say; None where there is no such."""
    case = found.case
    if failure.device != "cpu" or beyond(case):
        return None
    try:
        capabilities = worlds.tables().capabilities
        near = [(told, at) for told, at in found.controls if same_words(case, at)]
        difference, control = near[0] if near else ("", None)
        # An engine that raises or hangs shows nothing: then it is enough that a run ends.
        judged = ending.how == "Failed"
        setting = Setting(case=case, numerics=worlds(case).numerics if judged else None)
        passing = (
            None if control is None else Setting(case=control, numerics=worlds(control).numerics)
        )
    except FsdpPropertiesError:
        return None
    mismatches = ending.verdict.mismatches
    return Shown(
        setting=setting,
        property_id=failure.name,
        engine=failure.engine,
        family=capabilities.name,
        how=ending.how,
        seen=str(mismatches[0]) if mismatches else ending.verdict.reason,
        versions=f"torch {capabilities.versions.get('torch')}, Python {platform.python_version()}",
        control=passing,
        difference=difference,
    )

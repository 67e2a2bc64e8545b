"""The repro scripts of planted faults: how soon there is one, and what it shows."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fsdp_engine.world.pool import WorldPool
from properties.judge import Judge, PropertyFailure
from properties.profiles import PROFILES
from properties.proof import NUM_RUNS, prove
from properties.trial import Trial
from properties.trusted import Rations
from tests.detection.search import Searching, Watch, items_of, search
from tests.detection.summary import percentile
from tests.faults.fault import Fault

DEFAULT = PROFILES["default"]
PROJECT_NEEDED = "it needs this project"

SCRIPTED = (
    "SampleShareWeights",
    "NoRankFactor",
    "NoRankFactorInOneMode",
    "LocalTokenCount",
    "MeanOfMeans",
    "RescaledByShards",
    "LastSyncSkipped",
    "LastMicroBatchOnly",
    "AccumulatedTwice",
    "ZeroTwoForgets",
    "OneRankShardGroup",
    "ReplicasAveragedTwice",
    "ReplicaAxisDropped",
    "ParameterNotReduced",
    "SmallScaleError",
    "AccumulatedInBf16",
    "ReducedInComputeDtype",
    "AutocastHardCoded",
    "NormOfOwnShard",
    "InferenceShifted",
    "RestoreIgnored",
    "WarmupIgnored",
)
"""The faults measured by default: all that show in a gradient, and some that do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scripted:
    """One fault's script: `seconds` from the search's start in its row to the verified script.

    `with_fault` are the exit codes of its runs, `without` that of the same script on the reference
    engine. `needs` is what it imports.
    """

    fault: str
    property_id: str
    seconds: float
    num_lines: int
    needs: str
    with_fault: tuple[int, ...]
    without: int
    error: str = ""

    @property
    def good(self) -> bool:
        """Whether it shows the fault, only the fault, and is short."""
        return (*self.with_fault, self.without) == (1,) * NUM_RUNS + (0,) and self.num_lines <= 80

    def line(self) -> str:
        """What is printed of it."""
        told = (
            f"{self.fault}  {self.property_id}  {self.seconds:.1f} s  {self.num_lines} lines  "
            f"{self.needs}  with {self.with_fault}  without {self.without}"
        )
        return (told if self.good else f"NOT SHOWN  {told}") + (
            f"\n  {self.error}" * bool(self.error)
        )

    def to_plain(self) -> dict[str, Any]:
        """For the report."""
        return asdict(self) | {"good": self.good}


def summary(measured: Sequence[Scripted]) -> dict[str, Any]:
    """How many are good, how many need this project, how long they took."""
    seconds = [one.seconds for one in measured]
    return {
        "scripts": len(measured),
        "good": sum(one.good for one in measured),
        "torch_and_engine_alone": sum(one.needs != PROJECT_NEEDED for one in measured),
        "median_seconds": statistics.median(seconds),
        "p90_seconds": percentile(seconds, 0.9),
        "longest": max(one.num_lines for one in measured),
    }


def scripted(fault: Fault, *, seed: int = 0) -> Scripted:
    """Search a fault by the first property that must find it, as a session does, script and all."""
    name = fault.found_by[0]
    with (
        tempfile.TemporaryDirectory(prefix="fsdp-scripts-") as root,
        WorldPool(fault.engine, case_timeout_s=DEFAULT.case_timeout_s) as pool,
    ):
        searching = Searching(profile=DEFAULT, seed=seed, root=Path(root))
        items = items_of(name, DEFAULT, first=fault.can_show)
        found = search(items, Watch(run=pool), searching)
        assert found is not None, f"{fault.name} is not found"
        test, item, _ = found
        judge = Judge(
            trial=Trial(worlds=pool, engine=fault.engine, known_issues=()),
            repro_folder=Path(root, "repro"),
            rations=Rations(),
        )
        began = time.monotonic()
        try:
            searching.run(test, item, judge)
        except PropertyFailure as failure:
            return _measured(
                fault, name, time.monotonic() - began, str(failure), Path(root, "repro")
            )
    raise AssertionError(f"{fault.name}: nothing is accused a second time")


def _measured(fault: Fault, name: str, seconds: float, message: str, folder: Path) -> Scripted:
    (script,) = folder.glob("*.py")
    text = script.read_text(encoding="utf-8")
    told = next(line for line in message.splitlines() if line.startswith("script: "))
    shown = prove(script, has_control=False)
    script.write_text(_without(fault, text), encoding="utf-8")
    clean = prove(script, has_control=False)
    return Scripted(
        fault=fault.name,
        property_id=name,
        seconds=round(seconds, 1),
        num_lines=len(text.splitlines()),
        needs=PROJECT_NEEDED if PROJECT_NEEDED in told else "torch and the engine alone",
        with_fault=shown.codes,
        without=max(clean.codes),
        error="" if "verified 2/2" in told else told,
    )


def _without(fault: Fault, text: str) -> str:
    """The same script on the reference engine without a fault."""
    module, _, name = fault.engine.partition(":")
    planted = f"from {module} import {name} as Faulty"
    if planted in text:
        return text.replace(planted, "from tests.faults.planting import Planted as Faulty")
    return text.replace(repr(fault.engine), repr("reference"))

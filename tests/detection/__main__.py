"""Measure the suites' power: `python -m tests.detection [--fault NAME ...]`.

Every planted fault is searched by each property that must find it, with every seed, by the rows and
draws of the default profile; what the first search finds is shrunk to its minimal case. With
`--clean` engines without a fault are judged instead, with `--scripts` the repro scripts of some
faults are made, run with and without the fault, and timed. Exits 1 where a fault is missed, a clean
engine accused, or a script no good.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from tests.detection import scripts, summary
from tests.detection.clean import CASES_PER_LOT, Judged, Lot, judge_lot
from tests.detection.measure import Measured, measure
from tests.detection.parallel import done_in_parallel, num_cores
from tests.detection.scripts import SCRIPTED, Scripted, scripted
from tests.faults.catalogue import FAULTS


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.detection", description=__doc__)
    parser.add_argument("--fault", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--jobs", type=int, default=num_cores())
    parser.add_argument("--clean", nargs="+", metavar="ENGINE", help="judge these instead")
    parser.add_argument("--cases", type=int, default=2000, help="with --clean: cases per engine")
    parser.add_argument(
        "--own", action="store_true", help="with --clean: only by the property that drew a case"
    )
    parser.add_argument("--first-lot", type=int, default=0, help="with --clean: other cases")
    parser.add_argument(
        "--scripts", action="store_true", help="measure the repro scripts of faults instead"
    )
    options = parser.parse_args(arguments)
    if options.scripts:
        return _scripts(options.fault or SCRIPTED)
    if options.clean:
        first = options.first_lot
        lots = range(first, first - (-options.cases // CASES_PER_LOT))
        return _clean(options.clean, lots, own=options.own, jobs=options.jobs)
    known = {fault.name for fault in FAULTS}
    unknown = set(options.fault or ()) - known
    if unknown:
        parser.error(f"--fault: {sorted(unknown)} unknown; there are {', '.join(sorted(known))}")
    chosen = [fault for fault in FAULTS if not options.fault or fault.name in options.fault]
    work = partial(measure, seeds=tuple(options.seeds), shrinks=not options.no_shrink)
    measured: list[Measured] = []
    for one in done_in_parallel(work, chosen, jobs=options.jobs):
        measured.append(one)
        _say(one.line())
        summary.write(measured)
    _say("", *(f"{name}: {value}" for name, value in summary.summary(measured).items()))
    return 0 if all(one.found for one in measured) else 1


def _scripts(names: Iterable[str]) -> int:
    """Measure one after the other: each runs several processes at once itself."""
    measured: list[Scripted] = []
    by_name = {fault.name: fault for fault in FAULTS}
    for name in names:
        measured.append(scripted(by_name[name]))
        _say(measured[-1].line())
    _say("", *(f"{name}: {value}" for name, value in scripts.summary(measured).items()))
    return 0 if all(one.good for one in measured) else 1


def _clean(engines: Iterable[str], lots: range, *, own: bool, jobs: int) -> int:
    """Judge clean engines; lots that an earlier run has finished are not run again."""
    folder = Path(".reports")
    folder.mkdir(exist_ok=True)
    accused = False
    for engine in engines:
        path = folder / f"clean-{engine.replace(':', '-')}{'-own' if own else ''}.jsonl"
        done = _finished(path)
        missing = [Lot(engine=engine, number=n, own=own) for n in lots if n not in done]
        with path.open("a", encoding="utf-8") as file:
            for judged in done_in_parallel(judge_lot, missing, jobs=jobs):
                done[judged.number] = judged
                file.write(judged.to_line() + "\n")
                file.flush()
                _say(*judged.accusations, *judged.inconclusive)
        accused |= _told(engine, [done[number] for number in lots])
    return 1 if accused else 0


def _finished(path: Path) -> dict[int, Judged]:
    if not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8").splitlines()
    return {judged.number: judged for judged in map(Judged.from_line, lines)}


def _told(engine: str, lots: list[Judged]) -> bool:
    """Print an engine's counts; whether it was accused."""
    endings: Counter[str] = Counter()
    issues: Counter[str] = Counter()
    for lot in lots:
        endings += Counter(lot.endings)
        issues += Counter(lot.known_issues)
    accusations = sum(len(lot.accusations) for lot in lots)
    counts = ", ".join(f"{name} {count}" for name, count in sorted(endings.items()))
    _say(
        f"{engine}: {sum(lot.num_cases for lot in lots)} cases, verdicts: {counts}",
        *(f"  known issue {name}: {count}" for name, count in sorted(issues.items())),
        f"  accusations: {accusations}",
    )
    return bool(accusations)


def _say(*lines: str) -> None:
    for line in lines:
        sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

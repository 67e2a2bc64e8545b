"""Measure speed and sensitivity: `python -m tests.bench [--only PART,...] [--faults N]`.

Prints one table and writes it to `.reports/bench.json`. A part is imported when it is run: ranks of
torch's own multi-process test import this module, and should not pay for the others.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.bench.table import Line

PARTS = ("speed", "rival", "overhead", "growth", "sensitivity", "device", "export", "shrinking")


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code, 0 unless a part could not be run at all."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--only", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--rounds", type=int, default=15, help="of every timing")
    parser.add_argument("--faults", type=int, metavar="N", help="only N faults, evenly chosen")
    options = parser.parse_args(arguments)
    chosen = options.only.split(",")
    unknown = sorted(set(chosen) - set(PARTS))
    if unknown:
        parser.error(f"--only: {unknown} unknown; there are {', '.join(PARTS)}")
    from tests.bench.table import table, write
    from tests.bench.work import Effort

    effort = Effort(rounds=max(1, options.rounds), num_faults=options.faults)
    lines: list[Line] = []
    for part in PARTS:
        if part in chosen:
            measure = importlib.import_module(f"tests.bench.{part}").measure
            lines += measure(effort)
            sys.stderr.write(f"{part}: done\n")
            write(lines)
    sys.stdout.write("\n".join(table(lines)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

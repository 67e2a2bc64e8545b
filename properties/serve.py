"""A session over the ranks of a torchrun job, on one machine or many.

    torchrun --nnodes=2 --node-rank=0 --nproc-per-node=2 --master-addr=HOST --master-port=29500
        -m properties.serve properties/ --engine torch_fsdp2 --profile smoke

The same line runs on every machine, with its own `--node-rank`. The process of rank 0 runs pytest
with the arguments given; the others fork ranks for it. A process of the job that is lost ends the
session, with its report.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Generator

import pytest

from fsdp_engine.contract.errors import FsdpPropertiesError
from fsdp_engine.contract.protocol import DEVICES
from fsdp_engine.world import processes
from fsdp_engine.world.device import settle
from fsdp_engine.world.place import serve_place
from fsdp_engine.world.torchrun import Places, in_job, open_places


class Job:
    """A pytest plugin: the session ends when a process of the job is lost."""

    def __init__(self, places: Places) -> None:
        self._places = places

    def pytest_report_header(self) -> str:
        """Where ranks run."""
        hosts = [place.host for place in self._places.others]
        names = ", ".join(sorted(set(hosts))) or "this machine"
        return f"job: {self._places.capacity} ranks by torchrun ({names})"

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Go on to the next test only while all are there."""
        result = yield
        if lost := self._places.lost:
            item.session.shouldfail = f"{lost}: the session ends"
        return result


def main(arguments: list[str]) -> int:
    """What a process of the job does; returns its exit code."""
    if not in_job():
        sys.stderr.write("properties.serve: to be started by torchrun\n")
        return int(pytest.ExitCode.USAGE_ERROR)
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--device", choices=DEVICES, default=os.environ.get("DEVICE", DEVICES[0]))
    device: str = parser.parse_known_args(arguments)[0].device
    try:
        settle(device)
        if os.environ["RANK"] != "0":
            serve_place(device)
            return 0
        places = open_places(device)
    except FsdpPropertiesError as error:
        sys.stderr.write(f"properties.serve: {error}\n")
        return int(pytest.ExitCode.USAGE_ERROR)
    processes.use(places, device)
    # Cases go to ranks one after the other: more workers would have no ranks of their own.
    return int(pytest.main([*arguments, "-n", "0"], plugins=[Job(places)]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

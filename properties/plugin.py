"""The pytest plugin: options, header, fixtures, and one test per row or given case."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from fsdp_engine.contract.case import Case
from fsdp_engine.contract.case_file import case_id
from fsdp_engine.contract.errors import CaseError, WorldError
from fsdp_engine.contract.protocol import DEVICES
from fsdp_engine.world import processes
from fsdp_engine.world.device import num_gpus
from properties import profiles, progress
from properties.budget import in_order
from properties.covering import Axes
from properties.issues.issue import shown_on
from properties.judge import Judge
from properties.known_issues import KNOWN_ISSUES
from properties.profiles import has_failed
from properties.replay import DEFAULT_ENGINE
from properties.session import (
    SESSION,
    WORKER_ENDS,
    WORKER_LACKS,
    WORKER_PATIENCE,
    WORKER_SEED,
    WORKER_STRATEGIES,
    WORKER_UNREPLAYABLE,
    WORKER_ZYGOTE,
    Reporter,
    Session,
)
from properties.suite import Search, Suite
from properties.trial import Trial

WORKERS_PER_GPU = 4

_TALLIES = pytest.StashKey[dict[str, Any]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fsdp-properties", "properties of FSDP training engines")
    group.addoption(
        "--engine",
        default=os.environ.get("ENGINE", DEFAULT_ENGINE),
        help="engine under test: a registered name or package.module:Class (env: ENGINE)",
    )
    group.addoption(
        "--profile",
        default=os.environ.get("PROFILE", "default"),
        help=f"how much to judge: {', '.join(profiles.PROFILES)} (env: PROFILE)",
    )
    group.addoption(
        "--device",
        default=os.environ.get("DEVICE", DEVICES[0]),
        help=f"what ranks compute on: {', '.join(DEVICES)} (env: DEVICE)",
    )
    group.addoption(
        "--minutes",
        type=float,
        metavar="N",
        help="run tests in an order of the seed's for so long, those that failed before first",
    )
    group.addoption("--report-json", type=Path, metavar="FILE", help="write the report here")
    group.addoption(
        "--nights",
        type=Path,
        metavar="FILE",
        help="add this session's margins to those of the file; a page beside the report shows all",
    )
    group.addoption(
        "--database",
        default=os.environ.get("EXAMPLE_DATABASE", ""),
        metavar="URL",
        help="a Redis that several machines keep failures in, redis://... (env: EXAMPLE_DATABASE)",
    )
    group.addoption(
        "--cases",
        type=Path,
        metavar="FILE",
        help="judge the cases of this file (a case file, or a JSON list of cases) and draw none",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "over(suite): one test per row or case of a suite")
    profiles.register()
    config.stash[SESSION] = Session(config)
    workerinput: dict[str, Any] = getattr(config, "workerinput", {})
    if WORKER_ZYGOTE in workerinput:
        with contextlib.suppress(WorldError):  # then the worker starts its own when it needs one
            processes.join(workerinput[WORKER_ZYGOTE], config.stash[SESSION].device)


def pytest_unconfigure(config: pytest.Config) -> None:
    if SESSION in config.stash:
        config.stash[SESSION].close()


def pytest_sessionstart(session: pytest.Session) -> None:
    config, state = session.config, session.config.stash[SESSION]
    if state.is_worker or not _judges(config):
        return
    report = state.begin()
    config.pluginmanager.register(Reporter(report, state))
    if progress.is_wanted(config):
        terminal: Any = config.pluginmanager.get_plugin("terminalreporter")
        config.pluginmanager.register(progress.Progress(report, terminal))
    if config.getoption("tx", None):
        state.close()  # the workers have worlds of their own


def pytest_report_header(config: pytest.Config) -> list[str]:
    report = config.stash[SESSION].report
    if report is None:
        return []
    versions = ", ".join(f"{name} {number}" for name, number in sorted(report.versions.items()))
    return [
        f"engine: {report.engine} on {report.device} ({versions})",
        f"profile: {report.profile}, seed: {report.seed} (to repeat: --hypothesis-seed)",
        *report.probe_lines(),
    ]


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker of xdist the session's seed and probe, and what its ranks are forked from."""
    session = node.config.stash[SESSION]
    node.workerinput[WORKER_SEED] = session.seed
    node.workerinput[WORKER_STRATEGIES] = list(session.strategies)
    node.workerinput[WORKER_LACKS] = list(session.lacks)
    if session.budget is not None:
        node.workerinput[WORKER_ENDS] = session.budget.ends
    node.workerinput[WORKER_PATIENCE] = session.patience
    node.workerinput[WORKER_UNREPLAYABLE] = session.unreplayable
    node.workerinput[WORKER_ZYGOTE] = processes.zygote(session.device).address


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One worker per core: four fifths of the time are the oracles, in the worker itself.

    With GPUs a few on each: a worker and its ranks hold half a gigabyte of it apiece.
    """
    most = WORKERS_PER_GPU * num_gpus() if config.getoption("--device") == "cuda" else math.inf
    return max(1, int(min(os.cpu_count() or 1, most)))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("over")
    if marker is None:
        return
    suite: Suite = marker.args[0]
    session = metafunc.config.stash[SESSION]
    if suite.on_device and session.device not in suite.on_device:
        where = " and ".join(f"--device {name}" for name in suite.on_device)
        needs = pytest.mark.skip(reason=f"not applicable: it shows on {where} alone")
        metafunc.parametrize("row", [pytest.param(None, id="no-device", marks=needs)])
        return
    items: Sequence[Axes | Case]
    if session.cases is None:
        items = suite.items(session.profile, strategies=session.strategies, lacks=session.lacks)
        if not items:
            lacking = pytest.mark.skip(
                reason="not applicable: all its rows are what the engine lacks"
            )
            metafunc.parametrize("row", [pytest.param(None, id="no-row", marks=lacking)])
            return
    else:
        items = [case for case in session.cases if suite.takes(case)]
    ids = [case_id(item)[:12] if isinstance(item, Case) else str(item) for item in items]
    metafunc.parametrize("row", items, ids=ids)


def pytest_collection_modifyitems(session: pytest.Session, items: list[pytest.Item]) -> None:
    """A failing test for every case of `--cases` that is none; the others are judged."""
    broken = session.config.stash[SESSION].broken_cases
    state = session.config.stash[SESSION]
    if state.budget is not None:
        root = session.config.rootpath
        keys = in_order(
            [item.nodeid for item in items],
            seed=state.seed,
            has_failed=lambda key: has_failed(root, key, url=state.database),
        )
        items.sort(key=lambda item: keys[item.nodeid])
    items += [
        BrokenCase.from_parent(session, name=f"broken-case-{number}", message=message)
        for number, message in enumerate(broken)
    ]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Nothing begins when the minutes are over."""
    budget = item.config.stash[SESSION].budget
    return True if budget is not None and budget.is_over else None


class BrokenCase(pytest.Item):
    """A case that cannot be read, as a test that says so."""

    def __init__(self, *, message: str, **keywords: Any) -> None:
        super().__init__(**keywords)
        self._message = message

    def runtest(self) -> None:
        raise CaseError(self._message)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], *_: object) -> str:
        """The message alone."""
        return str(excinfo.value)


@pytest.fixture
def judge(request: pytest.FixtureRequest) -> Iterator[Judge]:
    """`judge(check, case)`: run, confirm, write the repro, raise the property's exception."""
    session = request.config.stash[SESSION]
    judging = Judge(
        trial=Trial(
            worlds=session.worlds,
            engine=session.engine,
            known_issues=shown_on(session.device, KNOWN_ISSUES),
            hangs=session.hangs,
            lacks=session.lacks,
        ),
        repro_folder=Path(".repro"),
        device=session.device,
        rations=session.rations,
        budget=session.budget,
    )
    yield judging
    plain = {name: tally.to_plain() for name, tally in judging.tallies.items()}
    request.node.stash[_TALLIES] = plain


@pytest.fixture
def search(request: pytest.FixtureRequest) -> Search:
    """How the test at hand draws its cases."""
    session = request.config.stash[SESSION]
    return Search(
        profile=session.profile,
        seed=session.seed,
        key=request.node.nodeid,
        root=request.config.rootpath,
        database=session.database,
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Send the counts of a test along with its report, as plain data."""
    report = yield
    if call.when == "teardown" and _TALLIES in item.stash:
        report.__dict__["fsdp_properties"] = item.stash[_TALLIES]
    return report


def _judges(config: pytest.Config) -> bool:
    """Whether an engine is judged: not where only the project's own tests are asked for."""
    if config.getoption("collectonly") or config.getoption("help"):
        return False
    tests = config.rootpath / "tests"
    asked = [config.invocation_params.dir / arg.split("::")[0] for arg in config.args]
    return not all(path.resolve().is_relative_to(tests) for path in asked)

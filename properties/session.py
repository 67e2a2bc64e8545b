"""The state of one pytest process: options, worlds and, in the controller, the report."""

from __future__ import annotations

import json
import platform
import secrets
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from fsdp_engine.contract.case import Case
from fsdp_engine.contract.errors import AcceleratorError, CaseError, FsdpPropertiesError
from fsdp_engine.contract.protocol import DEVICES, DeviceName
from fsdp_engine.world.pool import WorldPool
from properties import nights, shared
from properties.budget import Budget
from properties.outcome import Worlds
from properties.probe import ProbedWorlds, probe
from properties.profiles import PROFILES, Profile
from properties.report import Report
from properties.repro import read_case_file, read_text
from properties.trial import Hangs
from properties.trusted import Rations

WORKER_SEED = "fsdp_properties_seed"
WORKER_ZYGOTE = "fsdp_properties_zygote"
WORKER_UNREPLAYABLE = "fsdp_properties_unreplayable"
WORKER_ENDS = "fsdp_properties_ends"
WORKER_STRATEGIES = "fsdp_properties_strategies"
WORKER_LACKS = "fsdp_properties_lacks"
WORKER_PATIENCE = "fsdp_properties_patience"
SESSION = pytest.StashKey["Session"]()

_SLOWER: dict[DeviceName, float] = {"cpu": 1.0, "sim": 2.0, "cuda": 1.0}
"""By how much a case's deadline is later there: what is simulated takes up to twice as long."""


class Session:
    """The options in force and the worlds they lead to.

    `cases` are those given with `--cases`, None where cases are drawn; `broken_cases` say what is
    wrong with the others of that file. `hangs` counts over the whole process. Workers of xdist are
    told the seed, the engine's `strategies` (none: all are drawn), what it `lacks` and what the
    probe found, `unreplayable`, by their controller, which alone keeps a
    `report`, once `begin` was called.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.engine: str = config.getoption("--engine")
        self.device = _device(config.getoption("--device"))
        self.profile = _profile(config.getoption("--profile"))
        self.cases, self.broken_cases = _given_cases(config.getoption("--cases"))
        self.is_worker = hasattr(config, "workerinput")
        self.seed = _seed(config)
        self.unreplayable: dict[str, str] = _inherited(config).get(WORKER_UNREPLAYABLE, {})
        self.strategies: tuple[str, ...] = tuple(_inherited(config).get(WORKER_STRATEGIES, ()))
        self.lacks: tuple[dict[str, str], ...] = tuple(_inherited(config).get(WORKER_LACKS, ()))
        self.patience: float = _inherited(config).get(WORKER_PATIENCE, 1.0)
        self.hangs = Hangs()
        self.rations = Rations()
        self.budget = _budget(config)
        self.report_path = _report_path(config.getoption("--report-json"))
        self.nights = _nights(config, self.report_path)
        self.database = _database(config.getoption("--database"))
        self.report: Report | None = None
        self._pool: WorldPool | None = None

    @property
    def worlds(self) -> Worlds:
        """The engine's worlds, started when first asked for."""
        if self._pool is None:
            self._pool = WorldPool(
                self.engine,
                case_timeout_s=self.profile.case_timeout_s * self.patience * _SLOWER[self.device],
                device=self.device,
            )
        return ProbedWorlds(self._pool, self.unreplayable) if self.unreplayable else self._pool

    def close(self) -> None:
        """End the worlds, if there are any."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def begin(self) -> Report:
        """Ask the engine for its versions, probe the machine and start the report.

        Raises:
            pytest.UsageError: the engine's name leads nowhere, its import raises or the device
                cannot be had, so that a bad name ends the session before a single test.
        """
        try:
            capabilities = self.worlds.tables().capabilities
        except AcceleratorError as error:
            self.close()
            raise pytest.UsageError(f"--device {self.device}: {error}") from error
        except FsdpPropertiesError as error:
            self.close()
            raise pytest.UsageError(f"--engine {self.engine}: {error}") from error
        self.strategies, self.lacks = capabilities.strategies, capabilities.lacks
        if capabilities.patience != self.patience:
            self.patience = capabilities.patience
            self.close()  # worlds with the right deadline are started when asked for
        self.unreplayable = probe(self.device)
        tools = {name: version(name) for name in ("hypothesis", "peft", "pytest", "transformers")}
        tools["python"] = platform.python_version()
        self.report = Report(
            engine=self.engine,
            device=self.device,
            versions=capabilities.versions | tools,
            profile=self.profile.name,
            seed=self.seed,
            max_world_size=self.profile.max_world_size,
            unreplayable=self.unreplayable,
            lacks=self.lacks,
        )
        return self.report


class Reporter:
    """Registered in the controller, or in the only process: collects, writes and shows."""

    def __init__(self, report: Report, session: Session) -> None:
        self._report = report
        self._path = session.report_path
        self._nights = session.nights
        self._budget = session.budget
        self._num_run = 0
        self._num_collected = 0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Of one process how many tests there are."""
        self._num_collected = len(session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """Of workers, each of which has collected them all."""
        self._num_collected = len(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count what a test judged, wherever it ran."""
        tallies: dict[str, dict[str, Any]] = getattr(report, "fsdp_properties", {})
        self._report.add(tallies)
        self._num_run += report.when == "setup"
        if report.when == "call":
            self._report.saw_test(report.start, report.stop)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the report; a property whose every case the engine refused fails the session.

        So does a budget in which no test could begin.
        """
        if self._path is not None:
            self._report.write(self._path)
            if self._nights is not None and self._report.tallies:
                shown = nights.page(nights.add(self._nights, nights.night(self._report)))
                self._path.with_suffix(".html").write_text(shown, encoding="utf-8")
        if session.exitstatus == pytest.ExitCode.OK:
            if self._report.unsatisfiable():
                session.exitstatus = pytest.ExitCode.TESTS_FAILED
            elif self._budget is not None and not self._num_run:
                session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Show the table."""
        if self._report.tallies:
            terminalreporter.section(f"properties of {self._report.engine}")
            for line in self._report.table():
                terminalreporter.line(line)
        if self._budget is not None:
            ran = f"{self._num_run} of {self._num_collected} tests were run"
            terminalreporter.line(f"{self._budget.minutes:g} minutes: {ran}")


def _profile(name: str) -> Profile:
    if name not in PROFILES:
        raise pytest.UsageError(f"--profile: {name!r} is unknown; legal are {', '.join(PROFILES)}")
    return PROFILES[name]


def _device(name: str) -> DeviceName:
    for device in DEVICES:
        if device == name:
            return device
    raise pytest.UsageError(f"--device: {name!r} is unknown; legal are {', '.join(DEVICES)}")


def _inherited(config: pytest.Config) -> dict[str, Any]:
    """What the controller told this process; empty where there is none."""
    told: dict[str, Any] = getattr(config, "workerinput", {})
    return told


def _seed(config: pytest.Config) -> int:
    """The controller's, the one given to Hypothesis, or a new one."""
    inherited = _inherited(config).get(WORKER_SEED)
    if inherited is not None:
        return int(inherited)
    given = config.getoption("--hypothesis-seed", None)
    if given is None:
        return secrets.randbelow(1 << 32)
    try:
        return int(given)
    except ValueError:
        raise pytest.UsageError(f"--hypothesis-seed: {given!r} is not a whole number") from None


def _budget(config: pytest.Config) -> Budget | None:
    """The controller's, or one that begins now; None where no minutes are given."""
    minutes = config.getoption("--minutes")
    if minutes is None:
        return None
    if not minutes > 0:
        raise pytest.UsageError(f"--minutes: {minutes!r} is not legal; legal is a number above 0")
    ends = _inherited(config).get(WORKER_ENDS)
    budget = Budget.from_start(minutes)
    return budget if ends is None else Budget(minutes=minutes, ends=float(ends))


def _given_cases(path: Path | None) -> tuple[tuple[Case, ...] | None, tuple[str, ...]]:
    """The readable cases of a file, None without one, and a message for every other.

    Raises:
        pytest.UsageError: the file itself cannot be read.
    """
    if path is None:
        return None, ()
    try:
        content = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        # CaseError, a bad encoding and bad JSON are ValueErrors.
        raise pytest.UsageError(f"--cases {path}: {error}") from error
    items = content if isinstance(content, list) else [content]
    if not items:
        raise pytest.UsageError(f"--cases {path}: the list is empty")
    cases: list[Case] = []
    broken: list[str] = []
    for index, item in enumerate(items):
        try:
            cases.append(read_case_file(json.dumps(item)).case)
        except CaseError as error:
            broken.append(f"--cases {path}, case {index}: {error}")
    return tuple(cases), tuple(broken)


def _nights(config: pytest.Config, report_path: Path | None) -> Path | None:
    path: Path | None = config.getoption("--nights")
    if path is not None and report_path is None:
        raise pytest.UsageError(f"--nights {path}: its page lies beside the report: --report-json")
    return path


def _database(url: str) -> str:
    """The address of a Redis that answers, or none.

    Raises:
        pytest.UsageError: it is no such address, nobody answers, or there is no client for it.
    """
    try:
        if url:
            shared.connect(url)
    except ValueError as error:
        raise pytest.UsageError(f"--database {url}: {error}") from error
    return url


def _report_path(path: Path | None) -> Path | None:
    """The report's path, with its folder made, so that a bad one is known before the run."""
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        except OSError as error:
            raise pytest.UsageError(f"--report-json {path}: {error}") from error
    return path

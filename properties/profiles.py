"""How much a run judges: `smoke` while editing, `default` before a merge, `nightly` on a farm.

These are the only Hypothesis profiles in use. Its automatic `ci` profile would draw the same cases
on every run and forget failures.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hypothesis import HealthCheck, Phase, settings
from hypothesis.database import DirectoryBasedExampleDatabase, ExampleDatabase

from properties import shared


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Sizes of a run.

    `strength` values of the main axes are combined in the covering array. A suite takes at most
    `main_rows` (the suite that judges all pairs) or `rows` of the array, the most varied, and draws
    `examples` cases in each; with `small_first` all but that suite take small rows where they have
    some. A suite over a table takes `table_cases` of it. Worlds have at most
    `max_world_size` ranks.
    """

    name: str
    strength: int
    max_world_size: int
    main_rows: int
    rows: int
    examples: int
    small_first: bool
    table_cases: int
    case_timeout_s: float


PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile(
            name="smoke",
            strength=2,
            max_world_size=4,
            main_rows=6,
            rows=1,
            examples=1,
            small_first=True,
            table_cases=2,
            case_timeout_s=10.0,
        ),
        Profile(
            name="default",
            strength=2,
            max_world_size=4,
            main_rows=1000,
            rows=11,
            examples=1,
            small_first=False,
            table_cases=1000,
            case_timeout_s=13.0,
        ),
        Profile(
            name="nightly",
            strength=3,
            max_world_size=8,
            main_rows=10_000,
            rows=100,
            examples=5,
            small_first=False,
            table_cases=1000,
            case_timeout_s=60.0,
        ),
    )
}


class _Failures(ExampleDatabase):
    """Keeps what failed, and not what came close: that would take the place of new draws."""

    def __init__(self, kept: ExampleDatabase) -> None:
        super().__init__()
        self._kept = kept

    def fetch(self, key: bytes) -> Iterable[bytes]:
        return self._kept.fetch(key)

    def save(self, key: bytes, value: bytes) -> None:
        if not key.endswith(b".pareto"):
            self._kept.save(key, value)

    def delete(self, key: bytes, value: bytes) -> None:
        self._kept.delete(key, value)


def has_failed(root: Path, key: str, *, url: str = "") -> bool:
    """Whether there is a failure of this test to begin with."""
    if url:
        return shared.has_failures(url, _short(key))
    return any(path.is_file() for path in database_path(root, key).rglob("*"))


def database_path(root: Path, key: str) -> Path:
    """Where the failures of one test are kept; there is nothing where it never failed."""
    return root / ".hypothesis" / "cases" / _short(key)


def _short(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def settings_of(profile: Profile, *, root: Path, key: str, url: str = "") -> settings:
    """The Hypothesis settings of one test.

    `key` names the test: tests made of one function keep their failures apart in the database
    below `root`, or in the Redis at `url`.
    """
    kept = shared.failures(url, _short(key)) if url else None
    return settings(
        max_examples=profile.examples,
        database=_Failures(kept or DirectoryBasedExampleDatabase(database_path(root, key))),
        deadline=None,
        derandomize=False,
        print_blob=True,
        # One failure per test: a second one would be shrunk as well, which takes as long again.
        report_multiple_bugs=False,
        # The explain phase runs the case dozens of times more.
        phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.target, Phase.shrink),
        suppress_health_check=(
            HealthCheck.too_slow,
            HealthCheck.data_too_large,
            HealthCheck.filter_too_much,
        ),
    )


def register() -> None:
    """Replace Hypothesis's own profiles for everything else that is run in this process."""
    settings.register_profile(
        "fsdp_properties",
        deadline=None,
        print_blob=True,
        derandomize=False,
        suppress_health_check=(HealthCheck.too_slow,),
    )
    settings.load_profile("fsdp_properties")

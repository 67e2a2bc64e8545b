"""A failing case on disk: the case file, and a script that shows the failure by itself."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from fsdp_engine.contract.case import Case
from fsdp_engine.contract.case_file import MAX_CASE_BYTES, case_from_json, case_id
from fsdp_engine.contract.codec import encode
from fsdp_engine.contract.errors import CaseError
from fsdp_engine.contract.limits import shortened

SCHEMA = 1

PROJECT = Path(__file__).resolve().parent.parent


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CaseFile:
    """What a case file holds. `property` is empty where the file is a case and nothing else."""

    case: Case
    property: str = ""


def source_of(value: Any) -> str:
    """A Python expression that rebuilds a case; fields with their default value are left out."""
    if isinstance(value, tuple):
        inner = ", ".join(map(source_of, value))
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return repr(value)
    given = []
    for entry in dataclasses.fields(value):
        item = getattr(value, entry.name)
        if item != _default(entry):
            given.append(f"{entry.name}={source_of(item)}")
    return f"{type(value).__name__}({', '.join(given)})"


def _default(entry: dataclasses.Field[Any]) -> Any:
    if entry.default_factory is not dataclasses.MISSING:
        return entry.default_factory()
    return entry.default


def case_file_text(case: Case, property_id: str) -> str:
    """The text of a case file: JSON with a schema number, the property and the case."""
    content = {"schema": SCHEMA, "property": property_id, "case": encode(case)}
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def read_case_file(text: str) -> CaseFile:
    """Read a case file, or a file that is a case and nothing else.

    Raises:
        CaseError: anything else; the message names the field.
    """
    if len(text) > MAX_CASE_BYTES:
        raise CaseError(f"case file: more than the {MAX_CASE_BYTES} characters that are legal")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:  # a number of too many digits is a ValueError
        raise CaseError(f"case file: not JSON ({error})") from error
    if not isinstance(content, dict) or "case" not in content:
        return CaseFile(case=case_from_json(text))
    unknown = sorted(set(content) - {"schema", "property", "case"})
    if unknown:
        raise CaseError(f"{unknown[0]!a}: unknown field; legal are schema, property, case")
    schema, name = content.get("schema"), content.get("property", "")
    if type(schema) is not int or schema != SCHEMA:
        raise CaseError(f"schema: {shortened(schema)} is not legal; legal is {SCHEMA}")
    if not isinstance(name, str):
        raise CaseError(f"property: {shortened(name)} is not legal; it must be a string")
    # Dumped again so that numbers which are none, and sizes, are refused in one place.
    return CaseFile(case=case_from_json(json.dumps(content["case"])), property=name)


def read_text(path: Path) -> str:
    """The text of a file that may be a case file, without reading one that is too large.

    Raises:
        CaseError: too large to be one.
        OSError, UnicodeDecodeError: it cannot be read, or is no text.
    """
    with path.open("rb") as file:
        content = file.read(MAX_CASE_BYTES + 1)
    if len(content) > MAX_CASE_BYTES:
        raise CaseError(f"case file: more than the {MAX_CASE_BYTES} bytes that are legal")
    return content.decode()


def repro_path(folder: Path, case: Case, property_id: str) -> Path:
    """Where the case file of a failure goes: `<case id>-<property>.json`."""
    slug = re.sub(r"[^A-Za-z0-9_.]+", "-", property_id)
    return folder / f"{case_id(case)[:12]}-{slug}.json"


def remove_repro(path: Path) -> None:
    """Remove a case file and its script, where they are there."""
    for suffix in (".json", ".py"):
        path.with_suffix(suffix).unlink(missing_ok=True)


def write_repro(
    folder: Path, case: Case, *, property_id: str, engine: str, device: str = "cpu"
) -> Path:
    """Write the case file and, beside it, the script; the path of the first."""
    folder.mkdir(parents=True, exist_ok=True)
    path = repro_path(folder, case, property_id)
    path.write_text(case_file_text(case, property_id), encoding="utf-8")
    script = _script(case, property_id=property_id, engine=engine, device=device)
    path.with_suffix(".py").write_text(script, encoding="utf-8")
    return path


def _script(case: Case, *, property_id: str, engine: str, device: str) -> str:
    fields = encode(case)
    lines = [f'"{name}": {json.dumps(value)}' for name, value in fields.items()]
    text = "{" + ",\n ".join(lines) + "}"
    # The folder of the run comes second: engines and checks of the user are found there.
    paths = list(dict.fromkeys((str(PROJECT), str(Path.cwd()))))
    return _TEMPLATE.format(
        property=property_id,
        engine=engine,
        name=case_id(case)[:12],
        case=text,
        paths=paths,
        property_repr=repr(property_id),
        engine_repr=repr(engine),
        device_repr=repr(device),
    )


_TEMPLATE = '''\
"""Case {name}: does engine {engine} keep the property {property}?

Run it with the Python that has torch and the project's dependencies. It prints one line and exits
0 if the property holds, 1 if it is violated, 2 if the case could not be run.
"""

import sys

sys.path[:0] = {paths}

from properties.replay import replay_text

PROPERTY = {property_repr}
ENGINE = {engine_repr}
DEVICE = {device_repr}
CASE = r"""
{case}
"""

if __name__ == "__main__":
    sys.exit(replay_text(CASE, property_id=PROPERTY, engine=ENGINE, device=DEVICE))
'''

"""Case files: whatever is done to a valid one, it is read, or refused with the field's name."""

from __future__ import annotations

import json
from typing import Any, TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_engine.contract.case import Case
from fsdp_engine.contract.case_file import MAX_CASE_BYTES, canonical_json, case_from_json, case_id
from fsdp_engine.contract.codec import encode
from fsdp_engine.contract.errors import CaseError
from properties.repro import case_file_text, read_case_file, source_of
from properties.strategies.cases import any_cases
from properties.strategies.tables import one_case
from tests.small_cases import CASE_NAMES

Path: TypeAlias = tuple[str | int, ...]

JUNK: tuple[object, ...] = (
    None, True, -1, 0, 1 << 70, 1.5, 1e300, "", "fsdp3", "NaN", [], [[]], {}, {"kind": "train"},
    {"kind": ["train"]}, {"kind": None}, "\ud800", [1, "a"],
)  # fmt: skip


def _paths(value: Any, path: Path = ()) -> list[Path]:
    found = [path]
    if isinstance(value, dict):
        for name, item in value.items():
            found += _paths(item, (*path, name))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            found += _paths(item, (*path, index))
    return found


def _told(path: Path) -> str:
    return "case" + "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path)


def _at(value: Any, path: Path) -> Any:
    for part in path:
        value = value[part]
    return value


def _refusal(text: str) -> str | None:
    """The message of the refusal; None where the text is a case, which then survives a trip."""
    try:
        case = read_case_file(text).case
    except CaseError as error:
        return str(error)
    assert case_from_json(canonical_json(case)) == case
    return None


@given(case=any_cases())
def test_cases_survive_json_and_source(case: Case) -> None:
    assert case_from_json(canonical_json(case)) == case
    read = read_case_file(case_file_text(case, "gradient-matches-oracle"))
    assert (read.case, read.property) == (case, "gradient-matches-oracle")
    assert read_case_file(canonical_json(case)).case == case
    assert eval(source_of(case), CASE_NAMES) == case
    assert case_id(case_from_json(canonical_json(case))) == case_id(case)


@given(data=st.data(), case=any_cases())
def test_a_junk_value_is_refused_by_name_or_legal(data: st.DataObject, case: Case) -> None:
    raw = encode(case)
    path = data.draw(st.sampled_from([path for path in _paths(raw) if path]))
    junk = data.draw(st.sampled_from(JUNK))
    _at(raw, path[:-1])[path[-1]] = junk
    refusal = _refusal(json.dumps(raw))
    named = [part for part in path if isinstance(part, str)]
    assert refusal is None or any(name in refusal for name in named), refusal


@given(data=st.data(), case=any_cases())
def test_a_value_of_no_legal_type_is_named_exactly(data: st.DataObject, case: Case) -> None:
    raw = encode(case)
    path = data.draw(st.sampled_from([path for path in _paths(raw) if path]))
    _at(raw, path[:-1])[path[-1]] = {"kind": "nothing", "junk": 1}
    with pytest.raises(CaseError) as caught:
        case_from_json(json.dumps(raw))
    assert _told(path) in str(caught.value)


@given(data=st.data(), case=any_cases())
def test_an_unknown_field_is_named(data: st.DataObject, case: Case) -> None:
    raw = encode(case)
    objects = [path for path in _paths(raw) if isinstance(_at(raw, path), dict)]
    path = data.draw(st.sampled_from(objects))
    _at(raw, path)["surprise"] = 1
    with pytest.raises(CaseError, match="surprise: unknown field"):
        case_from_json(json.dumps(raw))


@given(data=st.data(), case=any_cases())
def test_broken_text_never_raises_anything_else(data: st.DataObject, case: Case) -> None:
    text = case_file_text(case, "x")
    start = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.integers(start, min(len(text), start + 20)))
    insert = data.draw(
        st.sampled_from(("", "{", "]", '"', "-", "1e999", "Infinity", "\0", "9" * 5000))
    )
    assert _refusal(text[:start] + insert + text[stop:]) != ""


BATCHES = '"batches": [{"ranks": [[{"key": 0}], [{"key": 1}]]}]}'
"""The end of a case whose fields are otherwise free."""


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("9" * 5000, "not JSON"),
        ("[]", "case"),
        ('{"schema": 2, "case": {}}', "schema"),
        ('{"schema": true, "case": {}}', "schema"),
        ('{"schema": 1.0, "case": {}}', "schema"),
        ('{"mesh": {"shape": [' + "9" * 3000 + "]}, " + BATCHES, "mesh.shape"),
        ('{"mesh": ' + "[" * 900 + "]" * 900 + ", " + BATCHES, "mesh"),
        ('{"engine": {"overrides": [["lr", 1e999]]}, ' + BATCHES, "overrides lr"),
        ('{"\\ud800": 1}', "unknown field"),
        ('{"schema": 1, "property": 3, "case": {}}', "property"),
        ('{"schema": 1, "propperty": "x", "case": {}}', "propperty"),
        ('{"schema": 1, "property": "x", "case": {}}', "case.batches"),
        ('{"schema": 1, "property": "x", "case": {"batches": NaN}}', "NaN"),
        (" " * (MAX_CASE_BYTES + 1), "case file"),
    ],
)
def test_bad_files_are_refused_by_name(text: str, named: str) -> None:
    with pytest.raises(CaseError, match=named):
        read_case_file(text)


def test_the_source_leaves_defaults_out() -> None:
    (case,) = one_case()
    assert source_of(case) == (
        "Case(batches=(Batch(ranks=((Sequence(key=0),), (Sequence(key=1, loss_tokens=2),))),))"
    )

"""Frozen dataclasses to JSON values and back, strictly.

Nothing is ever evaluated or unpickled: a decoder built from the annotations accepts exactly the
declared fields with exactly the declared types and names the field that is wrong. Unions of
dataclasses are told apart by their `kind` field, which is a one-word `Literal`. Bytes leave the
JSON: `encode` appends them to `blobs` and writes their index.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any, Literal, TypeAlias, TypeVar, Union, cast, get_args, get_origin

from fsdp_engine.contract.errors import CaseError
from fsdp_engine.contract.limits import shortened

T = TypeVar("T")
Decoder: TypeAlias = Callable[[Any, Sequence[bytes]], Any]


class _Illegal(Exception):
    """A value that cannot be decoded; every level it passes on its way up adds to `path`.

    Paths are made of a failure alone: an observation has thousands of values, all of them legal.
    """

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.path = path

    def below(self, step: str) -> None:
        self.path = step + self.path


def encode(value: Any, blobs: list[bytes] | None = None) -> Any:
    """`value` (dataclasses, tuples, dicts, scalars, bytes) as JSON values."""
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, (tuple, list)):
        return [encode(item, blobs) for item in value]
    names = _field_names(cast(Any, type(value)))
    if names is not None:
        return {name: encode(getattr(value, name), blobs) for name in names}
    if isinstance(value, bytes):
        if blobs is None:
            raise TypeError("bytes need a list of blobs to go to")
        blobs.append(value)
        return len(blobs) - 1
    if isinstance(value, dict):
        return {str(key): encode(item, blobs) for key, item in value.items()}
    raise TypeError(f"{type(value).__name__} is not plain data")


def decode(cls: type[T], raw: Any, *, where: str, blobs: Sequence[bytes] = ()) -> T:
    """Build a `cls` from JSON values.

    Raises:
        CaseError: unknown or missing field, wrong type, or a value the class refuses; `where`
            and the path below it are in the message.
    """
    try:
        return cast(T, _decoder(cast(Any, cls))(raw, blobs))
    except _Illegal as error:
        raise CaseError(f"{where}{error.path}: {error.message}") from error


@functools.cache
def _field_names(cls: Any) -> tuple[str, ...] | None:
    """Of a dataclass; None for other types."""
    if not dataclasses.is_dataclass(cls):
        return None
    return tuple(field.name for field in dataclasses.fields(cls))


@functools.cache
def _decoder(annotation: Any) -> Decoder:
    if dataclasses.is_dataclass(annotation):
        return _dataclass_decoder(annotation)
    origin = get_origin(annotation)
    if origin is Literal:
        return _literal_decoder(get_args(annotation))
    if origin in (Union, types.UnionType):
        return _union_decoder(get_args(annotation))
    if origin is tuple:
        return _tuple_decoder(get_args(annotation))
    if origin is dict:
        return _dict_decoder(get_args(annotation))
    if annotation in _SCALARS:
        return _SCALARS[annotation]
    raise TypeError(f"no decoder for {annotation}")


def _dataclass_decoder(cls: Any) -> Decoder:
    hints = typing.get_type_hints(cls)
    fields = dataclasses.fields(cls)
    required = {
        f.name
        for f in fields
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    }
    decoders = {f.name: _decoder(hints[f.name]) for f in fields}

    def decode_object(raw: Any, blobs: Sequence[bytes]) -> Any:
        _expect(isinstance(raw, dict), raw, f"an object ({cls.__name__})")
        if raw.keys() != decoders.keys():
            _require_fields(raw)
        values = {}
        name = ""
        try:
            for name, item in raw.items():
                values[name] = decoders[name](item, blobs)
        except _Illegal as error:
            error.below(f".{name}")
            raise
        try:
            return cls(**values)
        except CaseError as error:
            raise _Illegal(str(error)) from error

    def _require_fields(raw: dict[str, Any]) -> None:
        unknown = sorted(set(raw) - set(decoders))
        if unknown:
            name = unknown[0] if unknown[0].isidentifier() else shortened(unknown[0])
            raise _Illegal(f"unknown field; legal are {', '.join(decoders)}", f".{name}")
        missing = sorted(required - set(raw))
        if missing:
            raise _Illegal("missing", f".{missing[0]}")

    return decode_object


def _literal_decoder(values: tuple[Any, ...]) -> Decoder:
    def decode_literal(raw: Any, _: Sequence[bytes]) -> Any:
        if not (isinstance(raw, str) and raw in values):
            raise _not_legal(raw, "one of " + ", ".join(map(str, values)))
        return raw

    return decode_literal


def _union_decoder(members: tuple[Any, ...]) -> Decoder:
    classes: list[Any] = [member for member in members if dataclasses.is_dataclass(member)]
    others = [(member, _decoder(member)) for member in members if member not in classes]
    by_kind = (
        {get_args(typing.get_type_hints(member)["kind"])[0]: _decoder(member) for member in classes}
        if len(classes) > 1
        else {}
    )
    only = _decoder(classes[0]) if len(classes) == 1 else None

    def decode_union(raw: Any, blobs: Sequence[bytes]) -> Any:
        if by_kind and isinstance(raw, dict):
            kind = raw.get("kind")
            if not (isinstance(kind, str) and kind in by_kind):
                raise _not_legal(kind, "one of " + ", ".join(by_kind), ".kind")
            return by_kind[kind](raw, blobs)
        if only and isinstance(raw, dict):
            return only(raw, blobs)
        for member, decoder in others:
            if _matches(raw, member):
                return decoder(raw, blobs)
        names = ", ".join(getattr(member, "__name__", str(member)) for member in members)
        raise _Illegal(f"{shortened(raw)} is not one of {names}")

    return decode_union


def _tuple_decoder(items: tuple[Any, ...]) -> Decoder:
    variadic = len(items) == 2 and items[1] is Ellipsis
    decoders = [_decoder(item) for item in items if item is not Ellipsis]

    def decode_tuple(raw: Any, blobs: Sequence[bytes]) -> Any:
        _expect(isinstance(raw, list), raw, "a list")
        if not variadic:
            _expect(len(raw) == len(decoders), raw, f"a list of {len(decoders)}")
        wanted = repeat(decoders[0]) if variadic else decoders
        found: list[Any] = []
        try:
            for decoder, item in zip(wanted, raw, strict=False):
                found.append(decoder(item, blobs))
        except _Illegal as error:
            error.below(f"[{len(found)}]")
            raise
        return tuple(found)

    return decode_tuple


def _dict_decoder(items: tuple[Any, ...]) -> Decoder:
    key, value = items
    decode_value = _decoder(value)

    def decode_dict(raw: Any, blobs: Sequence[bytes]) -> Any:
        _expect(isinstance(raw, dict), raw, "an object")
        found: dict[Any, Any] = {}
        name = ""
        try:
            for name, item in raw.items():
                found[int(name) if key is int else name] = decode_value(item, blobs)
        except _Illegal as error:
            error.below(f".{name}")
            raise
        return found

    return decode_dict


def _decode_float(raw: Any, _: Sequence[bytes]) -> float:
    if type(raw) is float:
        return raw
    _expect(_matches(raw, float), raw, "a number")
    try:
        return float(raw)
    except OverflowError as error:
        raise _Illegal(f"{shortened(raw)} is too large a number") from error


def _scalar_decoder(cls: Any, legal: str) -> Decoder:
    def decode_scalar(raw: Any, _: Sequence[bytes]) -> Any:
        if type(raw) is not cls and not _matches(raw, cls):
            raise _not_legal(raw, legal)
        return raw

    return decode_scalar


def _decode_bytes(raw: Any, blobs: Sequence[bytes]) -> bytes:
    legal = _matches(raw, int) and 0 <= raw < len(blobs)
    _expect(legal, raw, f"the index of one of {len(blobs)} blobs")
    return blobs[int(raw)]


_SCALARS: dict[Any, Decoder] = {
    str: _scalar_decoder(str, "a string"),
    bool: _scalar_decoder(bool, "true or false"),
    int: _scalar_decoder(int, "a whole number"),
    float: _decode_float,
    type(None): _scalar_decoder(type(None), "null"),
    bytes: _decode_bytes,
}


def _matches(raw: Any, cls: Any) -> bool:
    if cls is float:
        return isinstance(raw, (int, float)) and not isinstance(raw, bool)
    if cls is int:
        return isinstance(raw, int) and not isinstance(raw, bool)
    origin = get_origin(cls)
    if origin is tuple:
        return isinstance(raw, list)
    if origin is dict:
        return isinstance(raw, dict)
    if origin is Literal:
        return raw in get_args(cls)
    if cls is bytes:
        return _matches(raw, int)
    return isinstance(raw, cls)


def _expect(legal: bool, raw: Any, wanted: str) -> None:  # noqa: FBT001
    if not legal:
        raise _not_legal(raw, wanted)


def _not_legal(raw: Any, wanted: str, path: str = "") -> _Illegal:
    return _Illegal(f"{shortened(raw)} is not legal; it must be {wanted}", path)

"""Full tensors from what the ranks hold, and whether the parts fit together at all.

Along the shard axis the parts of one replica must tile the tensor: no gap, no overlap. Parts may be
uneven or empty. Replicas are assembled one by one, so that their agreement can be judged apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdp_engine.contract.case import Mesh
from fsdp_engine.contract.observation import FlatRange, LocalArray, Placement, Shard
from oracles.arrays import float64_of, same_bits, tensor_of
from oracles.verdict import Mismatch

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembled:
    """Full tensors by parameter name, once per replica; None: absent on every rank.

    A name whose parts do not fit together is missing here and named in `mismatches`.
    """

    replicas: tuple[dict[str, Tensor | None], ...]
    mismatches: tuple[Mismatch, ...]

    @property
    def full(self) -> dict[str, Tensor | None]:
        """The first replica's tensors."""
        return self.replicas[0]


class _Misfit(Exception):
    """The parts of one tensor do not fit; carries the finished mismatch."""

    def __init__(self, where: str, got: object, wanted: object) -> None:
        super().__init__(where)
        self.mismatch = Mismatch(where=where, got=str(got), wanted=str(wanted))


def assemble(
    ranks: Sequence[Sequence[LocalArray]], *, mesh: Mesh, shapes: Shapes, where: str
) -> Assembled:
    """Put the ranks' parts together.

    `ranks[r]` are rank r's parts, ranks in row-major order of the mesh. `shapes` are the tensors
    that must be there, by name. `where` opens every mismatch, for example `action 0 gradient`.
    """
    mismatches: list[Mismatch] = []
    tables = [
        _table(parts, f"{where}, rank {rank}", mismatches) for rank, parts in enumerate(ranks)
    ]
    for rank, table in enumerate(tables):
        mismatches += [
            Mismatch(where=f"{where} {name}, rank {rank}", got="nothing", wanted="an entry")
            for name in shapes
            if name not in table
        ]
        mismatches += [
            Mismatch(where=f"{where} {name}, rank {rank}", got="an entry", wanted="no such name")
            for name in table
            if name not in shapes
        ]
    replicas: list[dict[str, Tensor | None]] = []
    for replica in range(mesh.replicas):
        members = range(replica * mesh.shards, (replica + 1) * mesh.shards)
        full: dict[str, Tensor | None] = {}
        for name, shape in shapes.items():
            parts = {rank: tables[rank][name] for rank in members if name in tables[rank]}
            if len(parts) < mesh.shards:
                continue  # named above
            try:
                full[name] = _join(f"{where} {name}", parts, shape)
            except _Misfit as misfit:
                mismatches.append(misfit.mismatch)
        replicas.append(full)
    return Assembled(replicas=tuple(replicas), mismatches=tuple(mismatches))


def replica_mismatches(assembled: Assembled, *, where: str) -> list[Mismatch]:
    """Where a replica differs from the first one in any bit, or in being present."""
    found: list[Mismatch] = []
    for replica, tensors in enumerate(assembled.replicas[1:], start=1):
        for name, first in assembled.full.items():
            if name not in tensors:
                continue  # did not assemble: named there
            other = tensors[name]
            place = f"{where} {name}, replica {replica}"
            if first is None or other is None:
                if (first is None) != (other is None):
                    found.append(
                        Mismatch(where=place, got=_presence(other), wanted=_presence(first))
                    )
            elif not same_bits(first, other):
                found.append(_first_difference(place, first, other))
    return found


def _presence(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else "present"


def _first_difference(place: str, first: Tensor, other: Tensor) -> Mismatch:
    if first.dtype != other.dtype:
        return Mismatch(where=place, got=str(other.dtype), wanted=f"{first.dtype} as on replica 0")
    size = first.dtype.itemsize
    raw = [
        t.contiguous().reshape(-1, 1).view(torch.uint8).reshape(-1, size) for t in (first, other)
    ]
    flat = int((raw[0] != raw[1]).any(1).nonzero()[0])
    index = [int(i) for i in torch.unravel_index(torch.tensor(flat), first.shape)]
    wanted, got = (float(float64_of(tensor).reshape(-1)[flat]) for tensor in (first, other))
    return Mismatch(
        where=f"{place}{index}",
        got=repr(got),
        wanted=f"{wanted!r} as on replica 0, bit for bit",
        off=abs(got - wanted),
        allowed=0.0,
    )


def _table(
    parts: Sequence[LocalArray], where: str, mismatches: list[Mismatch]
) -> dict[str, LocalArray]:
    table: dict[str, LocalArray] = {}
    for part in parts:
        if part.name in table:
            mismatches.append(
                Mismatch(where=f"{where} {part.name}", got="two entries", wanted="one")
            )
        table[part.name] = part
    return table


def _join(where: str, parts: Mapping[int, LocalArray], shape: tuple[int, ...]) -> Tensor | None:
    """One replica's tensor. Raises `_Misfit`."""
    for rank, part in parts.items():
        if part.full_shape != shape:
            raise _Misfit(f"{where}, rank {rank}: full shape", part.full_shape, shape)
    kinds = {part.placement.kind for part in parts.values()}
    dims = {part.placement.dim for part in parts.values() if isinstance(part.placement, Shard)}
    if len(kinds) > 1 or len(dims) > 1:
        got = sorted(str(part.placement) for part in parts.values())
        raise _Misfit(f"{where}: placements", got, "one kind and one dim on all ranks")
    dim = dims.pop() if dims else 0
    if not 0 <= dim < max(len(shape), 1):
        raise _Misfit(f"{where}: shard dim", dim, f"a dim of {shape}")
    pieces = [_piece(f"{where}, rank {rank}", part, shape) for rank, part in parts.items()]
    filled = [piece for piece in pieces if piece.stop > piece.start]
    present = [piece.data is not None for piece in filled]
    if not any(present) and (filled or all(piece.data is None for piece in pieces)):
        return None
    if not all(present):
        absent = [piece.where for piece in filled if piece.data is None]
        raise _Misfit(f"{where}: absent on {len(absent)} of {len(filled)} ranks", absent, "none")
    if kinds == {"replicate"}:
        return _same_everywhere(where, pieces)
    return _tile(where, filled, shape, dim if kinds == {"shard"} else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Rows or flat elements `start` to `stop` of one rank."""

    where: str
    start: int
    stop: int
    data: Tensor | None


def _extent(placement: Placement, shape: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
    """Start and stop of the part, in rows or flat elements, and the local shape it must have."""
    if isinstance(placement, Shard):
        dim, length = placement.dim, placement.length
        local = (*shape[:dim], length, *shape[dim + 1 :])
        return placement.start, placement.start + length, local
    if isinstance(placement, FlatRange):
        return placement.start, placement.stop, (placement.stop - placement.start,)
    return 0, math.prod(shape), shape


def _piece(where: str, part: LocalArray, shape: tuple[int, ...]) -> _Piece:
    start, stop, local = _extent(part.placement, shape)
    if part.data is None:
        return _Piece(where=where, start=start, stop=stop, data=None)
    try:
        data = tensor_of(part.data)
    except ValueError as error:
        raise _Misfit(f"{where}: data", error, "bytes that fill the shape") from error
    # An empty part or a flat one may come in any shape with the right number of elements.
    plain = data.numel() == 0 or isinstance(part.placement, FlatRange)
    fits = data.numel() == math.prod(local) if plain else tuple(data.shape) == local
    if stop < start or not fits:
        raise _Misfit(f"{where}: local shape", tuple(data.shape), f"{local}: {part.placement}")
    return _Piece(where=where, start=start, stop=stop, data=data)


def _same_everywhere(where: str, pieces: list[_Piece]) -> Tensor:
    tensors = [piece.data for piece in pieces if piece.data is not None]
    for piece in pieces[1:]:
        if piece.data is not None and not same_bits(tensors[0], piece.data):
            difference = _first_difference(piece.where, tensors[0], piece.data)
            raise _Misfit(f"{where}: {difference.where}", difference.got, difference.wanted)
    return tensors[0]


def _tile(where: str, pieces: list[_Piece], shape: tuple[int, ...], dim: int | None) -> Tensor:
    """Join pieces along `dim`, or as flat ranges where it is None."""
    extent = math.prod(shape) if dim is None else shape[dim]
    position = 0
    ordered = sorted(pieces, key=lambda piece: piece.start)
    for piece in ordered:
        if piece.start != position:
            kind = "a gap" if piece.start > position else "an overlap"
            low, high = sorted((piece.start, position))
            raise _Misfit(f"{piece.where}: {kind}", f"{low} to {high}", "parts that tile")
        position = piece.stop
    if position != extent:
        kind = "a gap" if position < extent else "parts past the end"
        low, high = sorted((extent, position))
        raise _Misfit(f"{where}: {kind}", f"{low} to {high}", "parts that tile")
    tensors = [piece.data for piece in ordered if piece.data is not None]
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        raise _Misfit(f"{where}: dtypes", sorted(map(str, dtypes)), "one on all ranks")
    if not tensors:
        data = next((piece.data for piece in pieces if piece.data is not None), None)
        return torch.empty(shape, dtype=data.dtype if data is not None else None)
    if dim is None:
        return torch.cat([tensor.reshape(-1) for tensor in tensors]).reshape(shape)
    return torch.cat(tensors, dim)

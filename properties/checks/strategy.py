"""The mesh of every size option and the strategy of every mesh, as total functions."""

from __future__ import annotations

import re

from fsdp_engine.contract.case import Case
from fsdp_engine.contract.limits import MAX_WORLD_SIZE
from fsdp_engine.contract.protocol import Answer, Run
from oracles.sharding import mesh_shape, strategy_name
from oracles.verdict import Mismatch, Verdict, exactly, not_applicable

MESH_QUESTIONS: tuple[tuple[int, int], ...] = tuple(
    (world_size, fsdp_size)
    for world_size in range(1, MAX_WORLD_SIZE + 1)
    for fsdp_size in range(-2, 71)
)
STRATEGY_QUESTIONS: tuple[tuple[int, bool], ...] = tuple(
    (ndim, zero3) for ndim in range(5) for zero3 in (True, False)
)

_NOT_OFFERED = "UnsupportedCase"


def mesh_is_total(case: Case, run: Run) -> Verdict:  # noqa: ARG001  a table for all cases
    """Worlds 1 to 64, sizes -2 to 70: a mesh of the whole world, or a ConfigError naming the size.

    Not applicable to an engine that answers every question with `UnsupportedCase`.
    """
    answers = run.tables(mesh_shapes=MESH_QUESTIONS).mesh_shapes
    if _none_offered(answers):
        return not_applicable("the engine offers no size option")
    mismatches = []
    for (world_size, fsdp_size), answer in zip(MESH_QUESTIONS, answers, strict=True):
        wanted = mesh_shape(world_size, fsdp_size)
        where = f"mesh of world size {world_size}, fsdp_size {fsdp_size}"
        mismatches += _differs(where, answer, wanted, refusal="ConfigError", named=fsdp_size)
    return exactly(mismatches)


def strategy_is_total(case: Case, run: Run) -> Verdict:  # noqa: ARG001  a table for all cases
    """Mesh ndim 0 to 4, ZeRO-3 or ZeRO-2: a strategy for 1 and 2, else a NotImplementedError.

    Not applicable to an engine that answers every question with `UnsupportedCase`.
    """
    answers = run.tables(strategies=STRATEGY_QUESTIONS).strategies
    if _none_offered(answers):
        return not_applicable("the engine names no strategies")
    mismatches = []
    for (ndim, zero3), answer in zip(STRATEGY_QUESTIONS, answers, strict=True):
        wanted = strategy_name(ndim, zero3=zero3)
        where = f"strategy of mesh ndim {ndim}, zero3 {zero3}"
        mismatches += _differs(where, answer, wanted, refusal="NotImplementedError", named=ndim)
    return exactly(mismatches)


def _none_offered(answers: tuple[Answer, ...]) -> bool:
    return all(answer.error_kind == _NOT_OFFERED for answer in answers)


def _differs(
    where: str,
    answer: Answer,
    wanted: str | tuple[int, ...] | None,
    *,
    refusal: str,
    named: int,
) -> list[Mismatch]:
    if wanted is not None:
        right = answer.error_kind is None and answer.value == wanted
        sentence = repr(wanted)
    else:
        right = answer.error_kind == refusal and _names(answer.error or "", named)
        sentence = f"{refusal} naming {named}"
    return [] if right else [Mismatch(where=where, got=_told(answer), wanted=sentence)]


def _names(message: str, number: int) -> bool:
    return re.search(rf"(?<![\d-]){re.escape(str(number))}(?!\d)", message) is not None


def _told(answer: Answer) -> str:
    if answer.error_kind is None:
        return repr(answer.value)
    return f"{answer.error_kind}: {answer.error}"

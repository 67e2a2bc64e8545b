"""What accelerate alone is known to do wrong, beside what torch's wrappers do.

What the suites cannot see, since the adapter does it right, is in `docs/findings/accelerate.md`.
"""

from __future__ import annotations

import functools

from fsdp_engine.contract.actions import Load, Save, Train
from fsdp_engine.contract.case import Case
from fsdp_engine.workload.models import build_model, trained_names
from properties.issues.issue import KnownIssue


def loads_state_without_rows(case: Case) -> bool:
    """FSDP1: a checkpoint is loaded where some rank has no row of a tensor that has moments."""
    loads = any(isinstance(action, Load) for action in case.program)
    moments = case.optimizer.kind == "adamw"
    return _fsdp1(case) and loads and moments and _leaves_a_rank_without_rows(case)


def surely_loads_state_without_rows(case: Case) -> bool:
    """The same, behind a step and a save, with nothing but training in between."""
    first, *others = case.program
    plain = all(isinstance(action, Train | Save | Load) for action in others)
    stepped = isinstance(first, Train) and first.step and case.model.optional == "none"
    return plain and stepped and loads_state_without_rows(case)


def loads_afresh(case: Case) -> bool:
    """FSDP1: moments are saved, and loaded where no step has been yet."""
    stepped = saved = False
    for action in case.program:
        match action:
            case Train(step=True):
                stepped = True
            case Save():
                saved = stepped
            case Load(fresh=True) if saved and case.optimizer.kind == "adamw":
                return _fsdp1(case)
            case _:
                pass
    return False


def _fsdp1(case: Case) -> bool:
    return case.engine.strategy == "fsdp1" and case.mesh.ndim == 1


def _leaves_a_rank_without_rows(case: Case) -> bool:
    ranks = case.mesh.world_size
    chunks = ((rows, -(-rows // ranks)) for rows in _trained_rows(case))
    return any(chunk * (ranks - 1) >= rows for rows, chunk in chunks)


@functools.lru_cache(maxsize=64)
def _trained_rows(case: Case) -> tuple[int, ...]:
    """The first extents of the parameters that train."""
    trained = trained_names(case.model)
    parameters = build_model(case).named_parameters()
    return tuple(value.shape[0] for name, value in parameters if name in trained)


OWN = (
    KnownIssue(
        id="accelerate-fsdp1-loads-no-state-without-rows",
        engines=("accelerate",),
        reason="load_state raises where some rank has no row of an optimizer's tensor: torch's "
        "distributed checkpoint cannot load a ShardedTensor that has no shard on a rank",
        reference="docs/findings/torch_fsdp1_rowless_rank.py",
        hits=loads_state_without_rows,
        must=surely_loads_state_without_rows,
        ends=("RaisedCheckpointException",),
        says=("Missing key in checkpoint state_dict",),
        must_in=("resume-equals-uninterrupted",),
    ),
    KnownIssue(
        id="accelerate-fsdp1-resumes-without-moments",
        engines=("accelerate",),
        reason="load_state before the first step leaves the optimizer without moments and says "
        "nothing: it loads what the optimizer has so far, and that is none",
        reference="docs/findings/accelerate_fsdp1_resume_loses_moments.py",
        hits=loads_afresh,
        must=loads_afresh,
        ends=("Failed",),
        says=("got absent, should be present",),
        must_in=("resume-equals-uninterrupted",),
    ),
)

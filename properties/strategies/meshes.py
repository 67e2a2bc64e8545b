"""Device meshes, one family per value of the mesh axis, the smallest first."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from fsdp_engine.contract.case import Mesh

_SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    "single": ((1,),),
    "line2": ((2,),),
    "line3": ((3,),),
    "line4": ((4,),),
    "grid": ((2, 2),),
    "column": ((2, 1), (3, 1), (4, 1)),
    "row": ((1, 2), (1, 3), (1, 4)),
    "wide_line": ((5,), (6,), (7,), (8,)),
    "wide_grid": ((3, 2), (2, 3), (4, 2), (2, 4), (5, 1), (1, 5)),
}


def meshes(name: str) -> SearchStrategy[Mesh]:
    """Meshes of the family `name` of the main axis `mesh`."""
    return st.sampled_from(_SHAPES[name]).map(lambda shape: Mesh(shape=shape))

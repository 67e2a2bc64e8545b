"""Exports in programs: of what, how they are taken, and when the rest of one is."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, TypeAlias

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from fsdp_engine.contract.actions import Action, Export, Resume, Train
from properties.strategies.setting import Setting

Staging: TypeAlias = Literal["auto", "force", "skip"]
Drain: TypeAlias = Literal["full", "close", "raise", "hold"]


@st.composite
def takes(draw: DrawFn, setting: Setting) -> Export:
    """An export, whole or in part."""
    staging: SearchStrategy[Staging] = st.sampled_from(("auto", "force", "skip"))
    drain: SearchStrategy[Drain] = st.sampled_from(("full", "hold", "close", "raise"))
    contents = draw(st.sampled_from(setting.contents), label="contents")
    taken = draw(drain, label="drain")
    return Export(
        staging=draw(staging, label="staging"),
        weights=contents,
        layered=contents == "adapter" and draw(st.booleans(), label="layered"),
        unfuse=setting.fuses and draw(st.booleans(), label="unfuse"),
        drain=taken,
        after=0 if taken == "full" else draw(st.sampled_from((1, 2, 0, 5)), label="after"),
    )


def with_an_export(actions: list[Action], setting: Setting) -> list[Action]:
    """Whole exports at the end, and before them, in half of the programs, one over a step.

    With an adapter they are that of the adapter, which comes at the start as well, of the base, and
    of the merged weights, once not to its end.
    """
    is_odd = len(actions) % 2 == 1
    over_step: list[Action] = [
        Export(
            weights=setting.contents[len(actions) % len(setting.contents)], drain="hold", after=1
        ),
        Train(step=True),
        Resume(),
    ]
    if is_odd:
        actions = [*actions, *over_step]
    if "adapter" not in setting.contents:
        return [*actions, Export(unfuse=setting.fuses)]
    return [
        Export(weights="adapter"),
        *actions,
        Export(weights="adapter", layered=is_odd),
        Export(weights="merged", drain="raise" if is_odd else "close", after=1),
        Export(weights="base"),
        Export(weights="merged", unfuse=setting.fuses),
    ]


def resumed(actions: list[Action]) -> list[Action]:
    """One export is held at a time, only what is held is resumed, and all of it in the end."""
    held = False
    resumed: list[Action] = []
    for action in actions:
        if isinstance(action, Export) and action.drain == "hold":
            resumed.append(replace(action, drain="close") if held else action)
            held = True
        elif not isinstance(action, Resume) or held:
            resumed.append(action)
            held = held and not isinstance(action, Resume)
    return [*resumed, Resume()] if held else resumed

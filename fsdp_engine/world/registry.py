"""Engines by name: a registered short name, or `package.module:Class`."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from typing import cast

from fsdp_engine.contract.errors import EngineLoadError
from fsdp_engine.contract.protocol import Engine

GROUP = "fsdp_properties.engines"

BUILT_IN: dict[str, str] = {
    "reference": "fsdp_engine.adapters.reference:Reference",
    "torch_fsdp1": "fsdp_engine.adapters.torch_fsdp:TorchFsdp1",
    "torch_fsdp2": "fsdp_engine.adapters.torch_fsdp:TorchFsdp2",
}
"""The engines that come with a checkout; installed packages register more in `GROUP`."""

OPTIONAL: dict[str, str] = {
    "torch_ddp": "fsdp_engine.adapters.torch_ddp:TorchDdp",
    "accelerate": "fsdp_engine.adapters.accelerate:Accelerate",
    "lightning": "fsdp_engine.adapters.lightning:Lightning",
    "verl": "fsdp_engine.adapters.verl.engine:Verl",
}
"""The same for engines that are imported when they are asked for: most need an extra of their name.
"""


def registered() -> dict[str, str]:
    """Short name to `package.module:Class`, of everything installed."""
    return BUILT_IN | OPTIONAL | {entry.name: entry.value for entry in entry_points(group=GROUP)}


def load_engine(name: str) -> Engine:
    """Import the class and build it without arguments.

    Raises:
        EngineLoadError: no such name, module or class. What the engine's own import or constructor
            raises is left as it is, for its traceback.
    """
    own = BUILT_IN | OPTIONAL
    path = name if ":" in name else own.get(name) or registered().get(name)
    if path is None:
        raise EngineLoadError(
            f"unknown engine {name!r}; legal is package.module:Class or one of "
            + ", ".join(sorted(registered()))
        )
    module_name, _, class_name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name + ".").startswith(error.name + "."):
            raise EngineLoadError(f"engine {name!r}: there is no module {error.name}") from error
        if name in OPTIONAL:
            extra = f"pip install 'fsdp-properties[{name}]'"
            raise EngineLoadError(
                f"engine {name!r}: {error.name} is not installed; {extra}"
            ) from error
        raise
    if not hasattr(module, class_name):
        raise EngineLoadError(f"engine {name!r}: {module_name} has no class {class_name!r}")
    return cast(Engine, getattr(module, class_name)())

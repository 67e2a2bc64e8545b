"""Which modules become units, and which parameters each of them owns."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fsdp_engine.contract.errors import ConfigError
from fsdp_engine.engine.config import WrapPolicy

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSlot:
    """Where a parameter is registered: stays valid when wrappers exchange the tensor there."""

    name: str
    module: nn.Module
    attribute: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A module that is wrapped, with the parameters that no unit below it owns."""

    module: nn.Module
    slots: tuple[ParameterSlot, ...]


def find_units(root: nn.Module, policy: WrapPolicy) -> tuple[Unit, ...]:
    """The units of an unwrapped model, inner before outer, the root last.

    Raises:
        ConfigError: a class name that no module has, nothing to wrap, or a parameter tied across
            units: neither wrapper can gather it in two places.
    """
    modules = _by_size(root, policy.min_num_params) if policy.min_num_params else []
    if not policy.min_num_params:
        modules = _by_class(root, policy.transformer_layer_cls_to_wrap)
    places = dict(root.named_modules(remove_duplicate=False))
    owners = _owners(places, {id(module) for module in modules})
    _require_ties_within(root, owners)
    owned: dict[int, list[ParameterSlot]] = {id(module): [] for module in [*modules, root]}
    for name, _ in root.named_parameters():
        path, _, attribute = name.rpartition(".")
        slot = ParameterSlot(name=name, module=places[path], attribute=attribute)
        owned[id(owners[path])].append(slot)
    return tuple(Unit(module=m, slots=tuple(owned[id(m)])) for m in [*modules, root])


def _require_ties_within(root: nn.Module, owners: dict[str, nn.Module]) -> None:
    first: dict[int, tuple[str, nn.Module]] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        owner = owners[name.rpartition(".")[0]]
        other_name, other = first.setdefault(id(parameter), (name, owner))
        if owner is not other:
            raise ConfigError(
                f"wrap_policy: {other_name} and {name} are one parameter in two units; legal is to "
                "wrap a module that holds both, or neither"
            )


def _owners(places: dict[str, nn.Module], units: set[int]) -> dict[str, nn.Module]:
    """For every path the innermost unit there or above; `places` lists outer before inner."""
    owners: dict[str, nn.Module] = {}
    for path, module in places.items():
        above = path.rpartition(".")[0]
        owners[path] = module if id(module) in units or not path else owners[above]
    return owners


def _by_class(root: nn.Module, names: tuple[str, ...] | None) -> list[nn.Module]:
    field = "wrap_policy.transformer_layer_cls_to_wrap"
    modules = list(root.modules())
    present = {type(module).__name__ for module in modules}
    if names is None:
        named = {n for m in modules for n in getattr(m, "_no_split_modules", None) or ()}
        wanted = named & present
        if not wanted:
            raise ConfigError(
                f"{field}: None needs a model that names its layers in _no_split_modules; "
                f"this one names {sorted(named)}"
            )
    else:
        wanted = set(names)
        missing = sorted(wanted - present)
        if missing:
            raise ConfigError(f"{field}: no module is a {missing[0]}; there are {sorted(present)}")
    found = [m for m in modules if type(m).__name__ in wanted and m is not root]
    return found[::-1]  # `modules` lists outer before inner


def _by_size(root: nn.Module, min_num_params: int) -> list[nn.Module]:
    """Modules that own at least so many elements that no unit below them owns."""
    units: list[nn.Module] = []
    taken: set[int] = set()

    def visit(module: nn.Module) -> None:
        for child in module.children():
            visit(child)
        own = [p for p in module.parameters() if id(p) not in taken]
        large = sum(p.numel() for p in own) >= min_num_params
        if large and module is not root and not isinstance(module, _CONTAINERS):
            units.append(module)
            taken.update(id(p) for p in own)

    visit(root)
    if not units:
        raise ConfigError(
            f"wrap_policy.min_num_params: {min_num_params!r} is more than any module has"
        )
    return units

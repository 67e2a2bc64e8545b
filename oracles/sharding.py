"""What is sharded over what: the mesh of a size option, the strategy's name, the units' layout.

All of it is arithmetic on the case; nothing here asks an engine or a process group.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from fsdp_engine.contract.batch import Batch, Sequence
from fsdp_engine.contract.case import Case, Dtype, DtypePolicy, Mesh
from fsdp_engine.contract.model import Model
from fsdp_engine.workload.models import build_model, unit_names, unit_of

ITEM_SIZE: dict[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per element, by dtype."""

_FLAT_ALIGNMENT_BYTES = 16


def mesh_shape(world_size: int, fsdp_size: int) -> tuple[int, ...] | None:
    """The mesh that `world_size` ranks form with shard groups of `fsdp_size`; None: refused.

    A negative size and one that is not smaller than the world both mean one shard group of all
    ranks. Any other size must cut the world into groups of equal size without a rest, and each
    rank of a group meets its replicas on the first axis.
    """
    if not 0 <= fsdp_size < world_size:
        return (world_size,)
    replicas = [count for count in range(1, world_size + 1) if count * fsdp_size == world_size]
    return (replicas[0], fsdp_size) if replicas else None


def strategy_name(mesh_ndim: int, *, zero3: bool) -> str | None:
    """The strategy on a mesh of `mesh_ndim` axes; None: there is none.

    ZeRO-3 frees parameters after forward, ZeRO-2 keeps them to the backward; a replicate axis
    makes either of them hybrid.
    """
    names = {
        (1, True): "FULL_SHARD",
        (1, False): "SHARD_GRAD_OP",
        (2, True): "HYBRID_SHARD",
        (2, False): "_HYBRID_SHARD_ZERO2",
    }
    return names.get((mesh_ndim, zero3))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterLayout:
    """One parameter of the model. `optional`: only gated sequences use it."""

    name: str
    shape: tuple[int, ...]
    trainable: bool
    optional: bool

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitLayout:
    """One wrapped unit with its own parameters in module order; the root's `name` is empty.

    `optional`: only gated sequences run it. `input_needs_grad` and `output_needs_grad`: whether
    autograd reaches the unit's inputs and outputs.
    """

    name: str
    parameters: tuple[ParameterLayout, ...]
    optional: bool
    input_needs_grad: bool
    output_needs_grad: bool

    @property
    def trainable(self) -> tuple[ParameterLayout, ...]:
        return tuple(parameter for parameter in self.parameters if parameter.trainable)


def unit_layouts(case: Case) -> tuple[UnitLayout, ...]:
    """The case's units: the root first, then the wrapped ones in forward order."""
    return _layouts_of(case.model)


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferLayout:
    """One buffer of the model. `saved`: the state dict has it."""

    num_bytes: int
    saved: bool


def buffer_layouts(case: Case) -> tuple[BufferLayout, ...]:
    """The model's buffers, in module order."""
    return _buffers_of(case.model, case.dtypes.storage)


def tied_names(case: Case) -> tuple[str, ...]:
    """Of every name that a parameter has the first one of the same parameter."""
    return _first_names_of(case.model)


def per_parameter_elements(parameters: tuple[ParameterLayout, ...], shards: int) -> int:
    """Elements of parameters that are each cut along dim 0 into `shards` equal parts.

    Rows that are missing to a multiple of `shards` are padding and are communicated too.
    """
    return sum(
        math.ceil(parameter.shape[0] / shards) * shards * math.prod(parameter.shape[1:])
        for parameter in parameters
    )


def flat_elements(parameters: tuple[ParameterLayout, ...], shards: int, compute: Dtype) -> int:
    """Elements of parameters laid out one after the other in a single flat one.

    Each parameter starts at a multiple of 16 bytes in the compute dtype, and the end is padded to
    a multiple of `shards`.
    """
    aligned = _FLAT_ALIGNMENT_BYTES // ITEM_SIZE[compute]
    end = 0
    for parameter in parameters:
        end = math.ceil(end / aligned) * aligned + parameter.numel
    return math.ceil(end / shards) * shards


def _case_of(model: Model, storage: Dtype = "float32") -> Case:
    """Any case of the model: its layout is the same in all of them."""
    return Case(
        model=model,
        mesh=Mesh(shape=(1,)),
        dtypes=DtypePolicy(storage=storage, compute=storage, reduce=storage),
        batches=(Batch(ranks=((Sequence(key=0),),)),),
    )


@functools.lru_cache(maxsize=256)
def _buffers_of(model: Model, storage: Dtype) -> tuple[BufferLayout, ...]:
    module = build_model(_case_of(model, storage))
    saved = module.state_dict().keys()
    return tuple(
        BufferLayout(num_bytes=buffer.numel() * buffer.element_size(), saved=name in saved)
        for name, buffer in module.named_buffers()
    )


@functools.lru_cache(maxsize=256)
def _first_names_of(model: Model) -> tuple[str, ...]:
    module = build_model(_case_of(model))
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    return tuple(first[id(parameter)] for _, parameter in every)


@functools.lru_cache(maxsize=256)
def _layouts_of(model: Model) -> tuple[UnitLayout, ...]:
    case = _case_of(model)
    members: dict[str, list[ParameterLayout]] = {name: [] for name in ("", *unit_names(case))}
    for name, parameter in build_model(case).named_parameters():
        layout = ParameterLayout(
            name=name,
            shape=tuple(parameter.shape),
            trainable=parameter.requires_grad,
            optional=name.endswith((".extra", ".other")),
        )
        members[unit_of(case, name)].append(layout)
    units: list[UnitLayout] = []
    reached = model.takes_tokens and any(
        parameter.trainable and "embed" in parameter.name for parameter in members[""]
    )
    for name in unit_names(case):
        into = reached
        reached = reached or any(parameter.trainable for parameter in members[name])
        units.append(
            UnitLayout(
                name=name,
                parameters=tuple(members[name]),
                optional=model.optional == "unit" and name == unit_names(case)[-1],
                input_needs_grad=into,
                output_needs_grad=reached,
            )
        )
    root = UnitLayout(
        name="",
        parameters=tuple(members[""]),
        optional=False,
        input_needs_grad=False,
        output_needs_grad=True,
    )
    return (root, *units)

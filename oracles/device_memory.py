"""What one rank's device holds at rest, between the passes and at most, in bytes.

For torch's two wrappers and models without optional or frozen parts. At rest there are the local
parts of parameters with their padding, buffers, and what the optimizer keeps of every trainable
element. Gradients that were reduced take as much as the parameters of their units.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from fsdp_engine.contract.actions import BATCH_ACTIONS, Export, Train
from fsdp_engine.contract.case import Case
from fsdp_engine.contract.observation import LocalArray, Numerics, RankObservation, TrainRecord
from oracles.memory import Held
from oracles.placement import Places, resting_places
from oracles.sharding import (
    ITEM_SIZE,
    ParameterLayout,
    buffer_layouts,
    flat_elements,
    per_parameter_elements,
    unit_layouts,
)

MOMENTS = {"sgd": 0, "adamw": 2}
"""Slots of an optimizer's state as large as the parameter. Step counters are on the host."""

OWN_NUMBERS = 16
"""Bytes of numbers an engine may keep for itself: FSDP1 keeps a zero that its norm begins with."""


def has_footprint(case: Case) -> bool:
    """Whether `oracles.footprint` speaks of the case: it is sharded, and no value decides a size.

    How many tokens an expert has is up to the weights.
    """
    return case.mesh.shards > 1 and case.model.family != "mixtral"


def is_predicted(case: Case, numerics: Numerics) -> bool:
    """Whether the functions below speak of the case."""
    model = case.model
    plain = model.optional == "none" and model.frozen == "none" and not model.lora_rank
    kinds = ("train", "infer", "export", "eval", "move")
    acts = all(action.kind in kinds for action in case.program)
    held = any(isinstance(a, Export) and a.drain == "hold" for a in case.program)
    return bool(numerics.semantics) and plain and acts and not held


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One training action on one rank, and the bytes that are on the device all through its passes.

    `kept` are those behind the action, without gradients. `first`: nothing has run before it.
    """

    place: str
    action: Train
    record: TrainRecord
    resting: int
    kept: int
    first: bool


def trainings(case: Case, numerics: Numerics, rank: RankObservation) -> Iterator[Training]:
    """The training actions, in order.

    What rests on the host is on the device meanwhile: the model all the time, the optimizer's
    state only while it steps. FSDP2's policy leaves both there.
    """
    hosted = case.engine.offload_policy
    model = model_bytes(case, numerics, Places(model=hosted, buffers=False, optimizer=hosted))
    places = resting_places(case)
    moments = 0
    for index, (action, record) in enumerate(zip(case.program, rank.records, strict=True)):
        if isinstance(action, Train) and isinstance(record, TrainRecord):
            before = moments
            if record.stepped:
                moments = optimizer_bytes(case, rank)
            at_rest = places[index].optimizer
            yield Training(
                place=f"action {index} (train) rank {rank.rank} bytes on the device",
                action=action,
                record=record,
                resting=model + (0 if at_rest else before),
                kept=model + (0 if at_rest else moments),
                first=not any(isinstance(a, BATCH_ACTIONS) for a in case.program[:index]),
            )


def model_bytes(case: Case, numerics: Numerics, places: Places) -> int:
    """Parameters and buffers of a rank that are on the device, without gradients."""
    buffers = sum(buffer.num_bytes for buffer in buffer_layouts(case))
    own = 0 if places.model else parameter_bytes(case, numerics)
    return own + (0 if places.buffers else buffers)


def parameter_bytes(case: Case, numerics: Numerics) -> int:
    """A rank's parts of all parameters, with padding; reduced gradients take as much."""
    elements = _all_elements(case, numerics)
    return elements // case.mesh.shards * ITEM_SIZE[numerics.storage]


def gradient_bytes(case: Case, numerics: Numerics) -> int:
    """A rank's reduced gradients on the device, where a backward leaves them."""
    return 0 if case.engine.offload_policy else parameter_bytes(case, numerics)


def behind_backward(case: Case, numerics: Numerics, held: Held, *, last: bool) -> int:
    """What gradients and gathered parameters take after a backward, beside what rests.

    `held` is what the wrapper keeps then; `last`: the micro-batch is the batch's last one. FSDP1
    that does not shard keeps gradients that wait where it keeps reduced ones, in the compute dtype.
    """
    if last or not case.engine.deferred:
        own = gradient_bytes(case, numerics)
    elif numerics.semantics == "fsdp1" and case.mesh.shards == 1:
        own = _all_elements(case, numerics) * ITEM_SIZE[numerics.compute]
    else:
        own = 0
    return held.gradient_bytes + held.parameter_bytes + own


def optimizer_bytes(case: Case, rank: RankObservation) -> int:
    """The moments of a rank's elements, once the optimizer has stepped. They have no padding."""
    return MOMENTS[case.optimizer.kind] * sum(map(_size, rank.initial))


def batch_bytes(case: Case, batch: int, rank: int, indices: tuple[int, ...]) -> int:
    """At most what one micro-batch itself takes while Python holds all of it.

    Its inputs, targets and masks, the module's output, that in fp32, the losses per token before
    and after masking, and four scalars; eight bytes for each.
    """
    sequences = case.batches[batch].ranks[rank]
    tokens = len(indices) * max(sequences[index].length for index in indices)
    wide = 1 if case.model.takes_tokens else case.model.width
    per_token = wide + 2 + case.model.vocab * 3 + 3
    return 8 * (tokens * per_token + len(indices) + 4)


def _all_elements(case: Case, numerics: Numerics) -> int:
    return sum(_elements(case, numerics, unit.parameters) for unit in unit_layouts(case))


def _elements(case: Case, numerics: Numerics, parameters: tuple[ParameterLayout, ...]) -> int:
    if numerics.semantics == "fsdp1":
        return flat_elements(parameters, case.mesh.shards, numerics.compute)
    return per_parameter_elements(parameters, case.mesh.shards)


def _size(part: LocalArray) -> int:
    if part.data is None:
        return 0
    return math.prod(part.data.shape) * ITEM_SIZE[part.data.dtype]

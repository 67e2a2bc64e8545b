"""The copies that each action of a program needs, least and most, by phase and direction."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from fsdp_engine.contract.actions import Export, Move, Resume, Train
from fsdp_engine.contract.case import Case
from fsdp_engine.contract.observation import RankObservation, TrainRecord
from fsdp_engine.workload.models import parameter_names
from oracles.device_memory import batch_bytes
from oracles.placement import Places, actual_places, is_staged, resting_places
from oracles.sharding import per_parameter_elements, unit_layouts
from oracles.transfers import (
    NOTHING,
    Allowed,
    allowed_in_training,
    bounds,
    moments,
    parameters,
    reads_values,
    unstaged,
    whole_model,
)

Bounds: TypeAlias = dict[tuple[str, str], tuple[Allowed, Allowed]]
"""`(phase, direction)` to the least and the most."""

_IN, _OUT = "host_to_device", "device_to_host"


def needed(case: Case, rank: RankObservation) -> Iterator[Bounds]:
    """Of every action of the program; empty where nothing is said about one.

    What is moved is known exactly, but for gradients, which are moved where there are any.
    """
    actual, resting = actual_places(case, rank), resting_places(case)
    for index, action in enumerate(case.program):
        match action:
            case Train():
                yield _of_training(case, action, rank, index, actual[index])
            case Export() | Resume():
                yield _of_export(case, action, rank, resting[index])
            case Move():
                yield _of_move(case, action, rank, index, actual[index])
            case _:
                yield {}


def _of_training(
    case: Case, action: Train, rank: RankObservation, index: int, places: Places
) -> Bounds:
    record = rank.records[index]
    assert isinstance(record, TrainRecord)
    sizes = [batch_bytes(case, action.batch, rank.rank, part) for part in record.plan]
    allowed = allowed_in_training(
        model_reads=reads_values(case.model),
        num_micro_batches=len(record.plan),
        batch_bytes=sum(sizes),
        world_size=case.mesh.world_size,
        num_parameters=len(parameter_names(case.model)),
    )
    if case.engine.offload_policy:
        passes = _whole(case) * len(record.plan)
        for phase in ("forward", "backward"):
            allowed[phase, _IN] += passes
        allowed["backward", _OUT] += passes
    found: Bounds = {key: (NOTHING, most) for key, most in allowed.items()}
    moved, gradients = _model_moves(case, rank, places)
    left = gradients if _has_gradients(case, rank, index) else NOTHING
    found["enter", _IN] = moved, moved + left
    found["leave", _OUT] = moved, moved + (NOTHING if record.stepped else gradients)
    found["enter", _OUT] = found["leave", _IN] = NOTHING, NOTHING
    if places.optimizer and not case.engine.offload_policy and action.step:
        existed = _state_before(rank, index)
        kept = moments(record.optimizer_state) if record.stepped else existed
        found["step", _IN] = existed, allowed["step", _IN] + existed
        found["step", _OUT] = kept, allowed["step", _OUT] + kept
    return found


def _of_export(
    case: Case, action: Export | Resume, rank: RankObservation, places: Places
) -> Bounds:
    moved, gradients = _model_moves(case, rank, places)
    told = bounds(case)
    own = NOTHING
    if places.model:
        own = unstaged(case, rank, buffers_on_host=places.buffers)
    is_whole = isinstance(action, Export) and action.drain == "full" and action.weights == "all"
    if isinstance(action, Export) and is_staged(case, action):
        least = moved if action.drain == "full" else NOTHING
        into, out = (least, moved + gradients + told), (least, moved + gradients + told)
    elif isinstance(action, Export):
        into, out = (own if is_whole else NOTHING, own + told), (NOTHING, told)
    else:
        into = out = (NOTHING, moved + gradients + own + told)
    return {("export", _IN): into, ("export", _OUT): out}


def _of_move(case: Case, action: Move, rank: RankObservation, index: int, places: Places) -> Bounds:
    hosted = action.to == "host"
    gradients = parameters(case, rank) if _has_gradients(case, rank, index) else NOTHING
    least = most = NOTHING
    if action.model and places.model != hosted:
        least = whole_model(case, rank)
        most = least + gradients
    if action.optimizer and places.optimizer != hosted:
        state = _state_before(rank, index)
        least, most = least + state, most + state
    moving, still = (_OUT, _IN) if hosted else (_IN, _OUT)
    return {("move", moving): (least, most), ("move", still): (NOTHING, NOTHING)}


def _model_moves(case: Case, rank: RankObservation, places: Places) -> tuple[Allowed, Allowed]:
    """What is moved in and out around a use of the model, and the gradients that may come along."""
    if not places.model or case.engine.offload_policy:
        return NOTHING, NOTHING
    return whole_model(case, rank), parameters(case, rank)


def _has_gradients(case: Case, rank: RankObservation, index: int) -> bool:
    """Before an action. FSDP1's flat gradient is also where a rank has no part of what trains."""
    if rank.resting[index].gradients:
        return True
    trained = [r for r in rank.records[:index] if isinstance(r, TrainRecord)]
    return case.engine.strategy == "fsdp1" and bool(trained) and not trained[-1].stepped


def _state_before(rank: RankObservation, index: int) -> Allowed:
    """The optimizer's state as the last step left it."""
    stepped = [r for r in rank.records[:index] if isinstance(r, TrainRecord) and r.stepped]
    return moments(stepped[-1].optimizer_state) if stepped else NOTHING


def _whole(case: Case) -> Allowed:
    """All parameters once, in the widest dtype of the case, as no rank has more of them."""
    layouts = [parameter for unit in unit_layouts(case) for parameter in unit.parameters]
    elements = per_parameter_elements(tuple(layouts), case.mesh.shards)
    return Allowed(count=len(layouts), num_bytes=8 * elements // case.mesh.shards)

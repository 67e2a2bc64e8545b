"""Which copies between host and device a program needs, where all of the engine is on the device.

A pass needs none. Around the passes a batch needs its counts and its plan agreed on, and a
micro-batch its tensors on the device and its loss on the host. A step needs the norm, and what
tells whether a parameter was used. An export on the device needs at most the bounds of the shards.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_engine.contract.model import Model
from fsdp_engine.contract.observation import Copy

TENSORS_OF_A_MICRO_BATCH = 5
"""Inputs, attention mask, gates, targets, loss mask."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """The most copies of one direction in one phase, and the most bytes of all of them."""

    count: int
    num_bytes: int


def crossings(copies: tuple[Copy, ...], phase: str, direction: str) -> tuple[Copy, ...]:
    """The copies of one phase in one direction."""
    return tuple(copy for copy in copies if (copy.phase, copy.direction) == (phase, direction))


def reads_values(model: Model) -> bool:
    """Whether the model's own forward asks values of the device: gates, routing to experts."""
    return model.optional != "none" or model.family == "mixtral"


def allowed_in_training(
    *,
    num_micro_batches: int,
    batch_bytes: int,
    world_size: int,
    num_parameters: int,
    model_reads: bool,
) -> dict[tuple[str, str], Allowed]:
    """By phase and direction. `batch_bytes`: of all of the rank's micro-batches together.

    `model_reads`: the passes read what the model asks for, which is not the engine's.
    """
    agreed = 64  # counts, plans: a few integers
    read = Allowed(count=num_micro_batches + 2, num_bytes=8 * num_micro_batches + 2 * agreed)
    written = Allowed(
        count=TENSORS_OF_A_MICRO_BATCH * num_micro_batches + 2, num_bytes=batch_bytes + 2 * agreed
    )
    told = Allowed(count=3, num_bytes=16 * world_size + num_parameters)
    nothing = Allowed(count=0, num_bytes=0)
    by_model = Allowed(count=1 << 20, num_bytes=1 << 30) if model_reads else nothing
    return {
        ("plan", "host_to_device"): written,
        ("plan", "device_to_host"): read,
        ("forward", "host_to_device"): nothing,
        ("forward", "device_to_host"): by_model,
        ("backward", "host_to_device"): nothing,
        ("backward", "device_to_host"): by_model,
        ("step", "host_to_device"): told,
        ("step", "device_to_host"): told,
    }


ALLOWED_IN_EXPORT: dict[tuple[str, str], Allowed] = {
    ("export", "host_to_device"): Allowed(count=1, num_bytes=1 << 16),
    ("export", "device_to_host"): Allowed(count=1, num_bytes=1 << 16),
}

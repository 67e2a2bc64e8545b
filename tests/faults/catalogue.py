"""The planted faults: their names, where they happened in public, which properties find them."""

from __future__ import annotations

from tests.faults.in_batches import IN_BATCHES
from tests.faults.in_checkpoints import IN_CHECKPOINTS
from tests.faults.in_devices import IN_DEVICES
from tests.faults.in_setup import IN_SETUP
from tests.faults.in_steps import IN_STEPS
from tests.faults.in_weights import IN_WEIGHTS

FAULTS = (*IN_BATCHES, *IN_STEPS, *IN_SETUP, *IN_WEIGHTS, *IN_CHECKPOINTS, *IN_DEVICES)
"""Every fault; those of one class are neighbours."""

"""verl 0.9.1: fsdp_size is not checked against the world.

0 must be refused by name, and so must a size that does not divide the number of ranks, for the mesh
that is asked of torch then leaves ranks out. Control: fsdp_size=2 of four ranks gives (2, 2).
Exit status 0: fixed, 1: reproduced, 2: could not run.
"""

import sys

from verl.workers.engine.fsdp import utils


def shape(world_size, fsdp_size):
    """The mesh that verl asks torch for, or the name of what it raises."""
    utils.init_device_mesh = lambda device, mesh_shape, **_: mesh_shape
    try:
        return utils.create_device_mesh(world_size, fsdp_size)
    except Exception as error:
        return type(error).__name__


control = shape(4, 2) == (2, 2)
zero, uneven = shape(4, 0), shape(3, 2)
seen = zero == "ZeroDivisionError" or uneven == (1, 2)
word = ("REPRODUCED" if seen else "FIXED") if control else "COULD NOT RUN"
print(f"{word}: fsdp_size 0 of four ranks gives {zero}, 2 of three ranks the mesh {uneven}")
sys.exit(int(seen) if control else 2)

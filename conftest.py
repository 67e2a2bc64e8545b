"""Wiring only: the plugin that holds the options and fixtures, and an early start."""

from __future__ import annotations

import os

from fsdp_engine.world import processes

pytest_plugins = ("properties.plugin",)

if "PYTEST_XDIST_WORKER" not in os.environ:
    # What ranks are forked from imports for seconds: it does so while this process does.
    processes.prepare()

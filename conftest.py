"""Wiring only: the plugin that holds the options and fixtures."""

from __future__ import annotations

pytest_plugins = ("properties.plugin",)

"""An engine whose import raises."""

from __future__ import annotations

raise RuntimeError("this engine needs a library that is broken")

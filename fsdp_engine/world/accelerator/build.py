"""The extension behind the device: built at its first use on a machine and kept."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch

from fsdp_engine.contract.errors import AcceleratorError

SOURCE = Path(__file__).parent / "native" / "device.cpp"
NAME = "simulated_device"
_LIBRARIES = ("c10", "torch", "torch_cpu", "torch_python")
CHECKED = ("2.13",)
"""The versions of torch that the device was tested with."""
_SHOWN_LINES = 12


def load() -> Any:
    """The extension module, built where this machine has none of this torch and source yet.

    Raises:
        AcceleratorError: there is no C++ compiler, or it does not get through the source.
    """
    library = library_path()
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with library.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the first of several ranks builds
            if not library.exists():
                _build(library)
    spec = importlib.util.spec_from_file_location(NAME, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def library_path() -> Path:
    """Where the extension of this Python, torch and source is kept: below `XDG_CACHE_HOME`."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    files = sorted(SOURCE.parent.glob("*.[ch]*"))
    source = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
    tag = f"{sys.implementation.cache_tag}-torch-{torch.__version__}-{source}"
    return cache / "fsdp-properties" / tag / f"{NAME}.so"


def compiler() -> list[str]:
    """The C++ compiler and its first arguments: `CXX`, or what is called `c++`."""
    return shlex.split(os.environ.get("CXX", "c++"))


def _build(library: Path) -> None:
    from torch.utils import cpp_extension  # noqa: PLC0415  costs a second; only a build needs it

    includes = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder) / library.name
        command = [
            *compiler(),
            *("-shared", "-fPIC", "-std=c++20", "-O1", "-w"),
            f"-DTORCH_EXTENSION_NAME={NAME}",
            *(f"-isystem{path}" for path in includes),
            *(str(SOURCE), "-o", str(built)),
            *(f"-L{path}" for path in cpp_extension.library_paths()),
            *(f"-l{name}" for name in _LIBRARIES),
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise AcceleratorError(
                f"the simulated accelerator needs a C++ compiler (CXX, or c++ on the path): {error}"
            ) from error
        if done.returncode != 0:
            lines = done.stderr.splitlines()[:_SHOWN_LINES]
            raise AcceleratorError(
                "\n  ".join(
                    [f"the simulated accelerator could not be built{_unchecked()}:", *lines]
                )
            )
        built.replace(library)


def _unchecked() -> str:
    version = torch.__version__
    if version.startswith(tuple(f"{checked}." for checked in CHECKED)):
        return ""
    return f" for torch {version} (it is tested with {', '.join(CHECKED)})"

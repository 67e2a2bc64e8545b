"""verl's platforms for plain CPU ranks and for the simulated accelerator.

verl imports this module by itself (`VERL_USE_EXTERNAL_MODULES`) and takes the platform that
`VERL_PLATFORM` names. What is answered is what its FSDP engine asks; memory calls do nothing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


class _Platform(PlatformBase):  # type: ignore[misc]  # verl has no types
    """What both have in common: one device, gloo, no vendor."""

    device_name = "cpu"
    vendor_name = "none"

    @property
    def device_module(self) -> ModuleType:
        module: ModuleType = vars(torch)["hpu"]
        return module

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:  # noqa: ARG002
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "NO_VISIBLE_DEVICES"

    def nvtx_range(self, msg: str) -> AbstractContextManager[None]:  # noqa: ARG002
        return nullcontext()

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None


class _HostModule(ModuleType):
    """`torch.cpu` with the calls about memory and random numbers that accelerators have."""

    get_rng_state = staticmethod(torch.get_rng_state)
    set_rng_state = staticmethod(torch.set_rng_state)

    def empty_cache(self) -> None: ...

    def memory_allocated(self, device: object = None) -> int:  # noqa: ARG002
        return 0

    max_memory_allocated = memory_reserved = max_memory_reserved = memory_allocated

    def mem_get_info(self, device: object = None) -> tuple[int, int]:  # noqa: ARG002
        return 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


_HOST = _HostModule("torch_cpu_for_verl")


class _HostDevice(str):
    """torch's name of the host, of which verl makes `cpu:0` where it puts a type before it."""

    __slots__ = ()

    def __format__(self, _: str) -> str:
        return "0"


@PlatformRegistry.register(platform="cpu")
class Host(_Platform):
    """The host: a device without an index, for an index means an accelerator to torch."""

    @property
    def device_module(self) -> ModuleType:
        return _HOST

    def current_device(self) -> str:
        return _HostDevice("cpu")


@PlatformRegistry.register(platform="hpu")
class Simulated(_Platform):
    """The simulated accelerator, of torch's type `hpu`."""

    device_name = "hpu"

    def current_device(self) -> int:
        return 0

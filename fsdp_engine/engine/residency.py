"""Where the model and the optimizer's state are: on the device while in use, else where they rest.

Whoever needs them there says so by `using`; the first user moves them in, the last one moves them
back. So contexts may be nested, and an export that is held keeps the model where it reads it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from fsdp_engine.contract.errors import ConfigError, EngineStateError
from fsdp_engine.engine.config import EngineConfig
from fsdp_engine.torch_private.accumulators import reshard
from fsdp_engine.torch_private.placement import move

Part: TypeAlias = Literal["model", "optimizer"]

HOST = torch.device("cpu")


class Residency:
    """Of one rank. Copies are blocking: what was moved to the host can be read there at once.

    With `offload_policy` FSDP2 itself keeps parameters, gradients and so the optimizer's state on
    the host, and nothing is ever moved here.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        config: EngineConfig,
        device: torch.device,
    ) -> None:
        self._module = module
        self._optimizer = optimizer
        self._device = device
        self._is_fixed = config.offload_policy
        self._rest: dict[Part, torch.device] = {
            "model": HOST if config.param_offload else device,
            "optimizer": HOST if config.optimizer_offload else device,
        }
        self._at: dict[Part, torch.device] = {"model": device, "optimizer": device}
        self._users: Counter[Part] = Counter()
        self.settle()

    @contextmanager
    def using(self, *parts: Part) -> Iterator[None]:
        """Inside, these are on the device; with their last user, in any end, they go to rest."""
        self._users.update(parts)
        try:
            for part in parts:
                self._move(part, self._device)
            yield
        finally:
            self._users.subtract(parts)
            self.settle()

    def leaves_with_last_user(self, part: Part) -> bool:
        """Whether its only user now is the last before it goes to the host."""
        return self._users[part] == 1 and self._rest[part] != self._device

    def settle(self) -> None:
        """Everything that nobody uses to where it rests, also state that an optimizer got anew."""
        for part, place in self._rest.items():
            if not self._users[part]:
                self._move(part, place)

    def rest(self, device: torch.device | str, *, model: bool, optimizer: bool) -> None:
        """Let these rest there from now on, the host or the engine's device.

        Raises:
            ConfigError: another device, or `offload_policy`, which alone places the model.
            EngineStateError: somebody is using it.
        """
        place = self._legal(device)
        wanted: dict[Part, bool] = {"model": model, "optimizer": optimizer}
        parts = [part for part, is_asked in wanted.items() if is_asked]
        if self._is_fixed and parts:
            raise ConfigError(
                f"to: {str(device)!r} is not legal with offload_policy, which keeps the model and "
                "the optimizer on the host"
            )
        used = [part for part in parts if self._users[part]]
        if used:
            raise EngineStateError(f"to: the {' and the '.join(used)} is in use; leave the context")
        for part in parts:
            self._rest[part] = place
        self.settle()

    def _legal(self, device: torch.device | str) -> torch.device:
        try:
            asked = torch.device(device)
        except RuntimeError:
            asked = None
        for place in (self._device, HOST):
            same_index = asked is not None and asked.index in (None, place.index or 0)
            if asked is not None and asked.type == place.type and same_index:
                return place
        raise ConfigError(f"to: {str(device)!r} is not legal; legal is cpu or {self._device}")

    def _move(self, part: Part, place: torch.device) -> None:
        if self._is_fixed or self._device == HOST:
            return
        if part == "optimizer":
            self._move_state(place)
        elif self._at[part] != place:
            reshard(self._module)
            move(self._module, place)
        self._at[part] = place

    def _move_state(self, place: torch.device) -> None:
        """Step counters are on the host in any case."""
        if self._optimizer is None:
            return
        for state in self._optimizer.state.values():
            for slot, value in state.items():
                if isinstance(value, Tensor) and slot != "step" and value.device != place:
                    state[slot] = value.to(place)

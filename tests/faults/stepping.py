"""Faults in clipping and in what happens where a gradient is not finite."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_engine.adapters import reference as adapter
from fsdp_engine.contract.protocol import StepResult
from fsdp_engine.engine import engine as engine_module
from fsdp_engine.engine import optimization
from fsdp_engine.engine.engine import FsdpEngine
from fsdp_engine.engine.gradient_sync import GradientSync
from fsdp_engine.engine.optimization import Optimization
from fsdp_engine.engine.step import clip, global_norm, local_gradients
from tests.faults.planting import Planted


def _once(module: nn.Module) -> Iterator[Tensor]:
    return iter(local_gradients(module))


class ClippingFindsNothing(Planted):
    """The gradients come from an iterator, which the norm has used up before they are scaled."""

    exchanged = ((optimization, "local_gradients", _once),)


class _ClipsAfterwards(Optimization):
    def step(self) -> StepResult:
        gradients = local_gradients(self._module)
        norm = global_norm(gradients, self._num_shards, self._device)
        finite = math.isfinite(norm)
        if finite:
            self._optimizer.step()
            clip(gradients, norm, self._config.clip_grad)
        return StepResult(norm=norm, stepped=finite)


class ClippedAfterStep(Planted):
    """The gradients are clipped when the optimizer has used them already."""

    exchanged = ((engine_module, "Optimization", _ClipsAfterwards),)


class _ClipsEachTime(GradientSync):
    @contextmanager
    def micro_batch(self, number: int, count: int) -> Iterator[None]:
        with super().micro_batch(number, count):
            yield
        if self._deferred and number < count - 1:
            return
        gradients = local_gradients(self._module)
        norm = global_norm(gradients, dist.get_world_size(), torch.device("cpu"))
        if math.isfinite(norm):
            clip(gradients, norm, 1.0)


class ClippedPerMicroBatch(Planted):
    """What is accumulated so far is clipped after every micro-batch."""

    exchanged = ((engine_module, "GradientSync", _ClipsEachTime),)


class _StepsAnyway(Optimization):
    def step(self) -> StepResult:
        gradients = local_gradients(self._module)
        norm = global_norm(gradients, self._num_shards, self._device)
        clip(gradients, norm, self._config.clip_grad)
        self._optimizer.step()
        return StepResult(norm=norm, stepped=True)


class StepTakenAnyway(Planted):
    """Nobody asks whether the norm is finite."""

    exchanged = ((engine_module, "Optimization", _StepsAnyway),)


class _AsksItsOwnLoss(FsdpEngine):
    def step(self) -> StepResult:
        optimization = self._optimizer("step")
        assert isinstance(optimization, _GoesByFlag)
        optimization.overflow = not math.isfinite(self._total)
        return super().step()


class _GoesByFlag(Optimization):
    overflow = False

    def step(self) -> StepResult:
        gradients = local_gradients(self._module)
        norm = global_norm(gradients, self._num_shards, self._device)
        if not self.overflow:
            clip(gradients, norm, self._config.clip_grad)
            self._optimizer.step()
        return StepResult(norm=norm, stepped=not self.overflow)


class OverflowFlagPerRank(Planted):
    """The flag that stops a step is not reduced: only the rank with the bad loss skips."""

    exchanged = (
        (adapter, "FsdpEngine", _AsksItsOwnLoss),
        (engine_module, "Optimization", _GoesByFlag),
    )


class _KeepsGradients(FsdpEngine):
    def step(self) -> StepResult:
        optimization = self._optimizer("step")
        self._settle()
        result = optimization.step()
        if result.stepped:
            self.weights.written()
        return result


class BadGradientsKept(Planted):
    """A step that is not taken leaves its gradients behind."""

    exchanged = ((adapter, "FsdpEngine", _KeepsGradients),)


class _StepsWithZeros(Optimization):
    def step(self) -> StepResult:
        result = super().step()
        if not result.stepped:
            for gradient in local_gradients(self._module):
                gradient.zero_()
            self._optimizer.step()
        return result


class SkippedStepDecays(Planted):
    """Bad gradients are set to zero and stepped with: weights decay, moments and counters move."""

    exchanged = ((engine_module, "Optimization", _StepsWithZeros),)

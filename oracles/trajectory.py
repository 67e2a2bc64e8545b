"""An optimizer step of a program against its formula, from the engine's own state before it.

Nothing is composed over steps: parameters, moments and step counter before a step are what the
engine showed last, the gradient is the clipped one that it showed, the learning rate is the
schedule's closed form.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import numpy as np
from torch import Tensor

from fsdp_engine.contract.case import Dtype, Optimizer
from oracles.arrays import Float64, array_of, dtype_name, float64_of
from oracles.bitwise import array_mismatches
from oracles.compare import compare_within
from oracles.findings import Findings
from oracles.learning_rate import learning_rate
from oracles.moments import Snapshot
from oracles.optimizers import AdamWState, adamw_step, sgd_step
from oracles.running_error import Bounded
from oracles.verdict import Mismatch

MOMENTS = ("exp_avg", "exp_avg_sq")
SLOTS = (*MOMENTS, "step")


class Trajectory:
    """The steps of one program so far: how often each parameter was stepped."""

    def __init__(self, options: Optimizer, storage: Dtype) -> None:
        self._options = options
        self._storage = storage
        self._steps: dict[str, int] = {}

    def step(
        self,
        where: str,
        before: Snapshot,
        after: Snapshot,
        gradients: Mapping[str, Tensor],
    ) -> Findings:
        """Judge one step in which exactly the parameters of `gradients` move.

        `gradients` are clipped. An engine that shows no optimizer state is judged where its state
        is known all the same: before a parameter's first step.
        """
        findings = Findings()
        still = before.weights.keys() - gradients.keys()
        findings.mismatches += still_mismatches(where, before, after, still)
        judged = [name for name in gradients if self._is_known(before, name)]
        if judged:
            self._map(findings, where, before, after, gradients, judged)
        for name in gradients:
            self._steps[name] = self._steps.get(name, 0) + 1
        return findings

    def _is_known(self, before: Snapshot, name: str) -> bool:
        shown = any(before.optimizer.get(slot) for slot in MOMENTS)
        return self._options.kind == "sgd" or shown or name not in self._steps

    def _map(  # noqa: PLR0917  one step is all of these
        self,
        findings: Findings,
        where: str,
        before: Snapshot,
        after: Snapshot,
        gradients: Mapping[str, Tensor],
        names: list[str],
    ) -> None:
        """All parameters as one vector: a step is elementwise, and one is faster than many."""
        options, storage = self._options, self._storage
        sizes = {name: before.weights[name].numel() for name in names}
        lr = learning_rate(options, before.schedule_steps)
        old = _joined(before.weights[name] for name in names)
        gradient = _joined(gradients[name] for name in names)
        if options.kind == "sgd":
            decay = options.weight_decay
            moved = sgd_step(old, gradient, lr=lr, weight_decay=decay, storage=storage)
            self._compare(findings, f"{where} parameter", after.weights, moved, sizes)
            return
        step = adamw_step(
            old,
            gradient,
            self._state(before, sizes),
            lr=lr,
            weight_decay=options.weight_decay,
            storage=storage,
        )
        self._compare(findings, f"{where} parameter", after.weights, step.parameter, sizes)
        if not any(after.optimizer.get(slot) for slot in SLOTS):
            return  # the engine cannot tell
        for slot, moment in zip(MOMENTS, (step.exp_avg, step.exp_avg_sq), strict=True):
            shown = after.optimizer.get(slot, {})
            self._compare(findings, f"{where} {slot}", shown, moment, sizes)
        findings.mismatches += self._counter_mismatches(where, before, after, names)

    def _state(self, before: Snapshot, sizes: dict[str, int]) -> AdamWState:
        moments = [_joined(_or_zeros(before, slot, name) for name in sizes) for slot in MOMENTS]
        counts = np.array([self._count(before, name) for name in sizes], dtype=np.float64)
        return AdamWState(
            exp_avg=moments[0], exp_avg_sq=moments[1], step=np.repeat(counts, list(sizes.values()))
        )

    def _count(self, before: Snapshot, name: str) -> float:
        """The engine's own step counter, or how often it was seen to step the parameter."""
        counter = before.optimizer.get("step", {}).get(name)
        return float(self._steps.get(name, 0)) if counter is None else float(counter)

    def _counter_mismatches(
        self, where: str, before: Snapshot, after: Snapshot, names: list[str]
    ) -> list[Mismatch]:
        shown = after.optimizer.get("step", {})
        mismatches = []
        for name in names:
            wanted = self._count(before, name) + 1.0
            got = shown.get(name)
            if shown and (got is None or float(got) != wanted):
                told = "absent" if got is None else repr(float(got))
                mismatches.append(
                    Mismatch(where=f"{where} step counter {name}", got=told, wanted=repr(wanted))
                )
        return mismatches

    def _compare(
        self,
        findings: Findings,
        where: str,
        shown: Mapping[str, Tensor],
        wanted: Bounded,
        sizes: dict[str, int],
    ) -> None:
        start = 0
        for name in sizes:
            tensor, place = shown.get(name), f"{where} {name}"
            part = slice(start, start + sizes[name])
            start = part.stop
            if tensor is None:
                absent = Mismatch(where=place, got="absent", wanted="present after a step")
                findings.mismatches.append(absent)
                continue
            if dtype_name(tensor.dtype) != self._storage:
                got = dtype_name(tensor.dtype)
                findings.mismatches.append(Mismatch(where=place, got=got, wanted=self._storage))
            compare_bounded(findings, place, tensor, wanted[part])


def compare_bounded(findings: Findings, where: str, tensor: Tensor, wanted: Bounded) -> None:
    """A tensor against numbers known to within a bound; where nothing is known it may be any."""
    shape = tuple(tensor.shape)
    got, value = float64_of(tensor), wanted.value.reshape(shape)
    allowed = wanted.error.reshape(shape)
    unknown = np.isinf(allowed)
    if unknown.any():
        got, allowed = np.where(unknown, value, got), np.where(unknown, 0.0, allowed)
    findings.add(compare_within(got, value, allowed, where=where))


def still_mismatches(
    where: str, before: Snapshot, after: Snapshot, names: Collection[str]
) -> list[Mismatch]:
    """Where parameters or their optimizer state are not bit for bit what they were.

    State that is absent equals zeros.
    """
    mismatches = []
    for name in sorted(names):
        old, new = before.weights[name], after.weights[name]
        mismatches += array_mismatches(f"{where} parameter {name}", array_of(new), array_of(old))
        for slot in sorted({*before.optimizer, *after.optimizer}):
            states = [snapshot.optimizer.get(slot, {}).get(name) for snapshot in (after, before)]
            present = [state for state in states if state is not None]
            if not present:
                continue
            got, wanted = (
                array_of(present[0].new_zeros(present[0].shape) if state is None else state)
                for state in states
            )
            mismatches += array_mismatches(f"{where} {slot} {name}", got, wanted)
    return mismatches


def _joined(tensors: Iterable[Tensor]) -> Float64:
    return np.concatenate([float64_of(tensor).reshape(-1) for tensor in tensors])


def _or_zeros(before: Snapshot, slot: str, name: str) -> Tensor:
    shown = before.optimizer.get(slot, {}).get(name)
    return before.weights[name].new_zeros(before.weights[name].shape) if shown is None else shown

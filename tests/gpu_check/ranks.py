"""Two ranks of plain FSDP2 on a device, in every compute dtype: where they were, what replay says.

`python -m tests.gpu_check.ranks DEVICE` prints one line, and exits 1 where a gradient is not that
of its replay, or where a fault in it is not found.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

from fsdp_engine.contract.case import Case
from fsdp_engine.contract.observation import LocalArray, Observation
from fsdp_engine.world.device import num_gpus
from fsdp_engine.world.pool import WorldPool
from oracles.arrays import array_of, tensor_of
from oracles.evaluation import Evaluator
from oracles.gradients import observed_gradients
from properties.probe import PROBE_ENGINE, first_difference, probe_cases


def main(device: str) -> int:
    """Run and tell."""
    with WorldPool(PROBE_ENGINE, device=device, case_timeout_s=60.0) as pool:
        shown = {dtype: (case, pool(case)) for dtype, case in probe_cases().items()}
    _, first = next(iter(shown.values()))
    where = ", ".join(rank.device for rank in first.ranks)
    backend = "NCCL" if any(level.fused for level in first.numerics.levels) else "gloo"
    told = [f"torch {torch.__version__}", f"ranks on {where} over {backend}"]
    if device == "cuda":
        told.insert(1, f"{num_gpus()} x {torch.cuda.get_device_name(0)}")
    failures = []
    for dtype, (case, observation) in shown.items():
        told.append(f"{dtype} {_in_words(_spread(case, observation))}")
        if difference := first_difference(case, observation):
            failures.append(f"{dtype}: {difference}")
        if first_difference(case, spoilt(observation)) is None:
            failures.append(f"{dtype}: a gradient that is wrong by a thousandth is not found")
    sys.stdout.write("; ".join(failures or told) + "\n")
    return int(bool(failures))


def _spread(case: Case, observation: Observation) -> float:
    """How far two replays in this process are apart, at most."""
    (shown,) = observed_gradients(Evaluator(case), observation)
    assert shown.prediction is not None
    return max(shown.prediction.local.spread.values(), default=0.0)


def _in_words(spread: float) -> str:
    return f"replays {spread:.2g} apart" if spread else "replays bit for bit"


def spoilt(observation: Observation) -> Observation:
    """Rank 0's first gradient wrong in its largest element."""
    rank = observation.ranks[0]
    (record,) = rank.records
    assert record.kind == "train"
    first, *others = record.gradients
    spoilt = replace(record, gradients=(_wrong(first), *others))
    return replace(observation, ranks=(replace(rank, records=(spoilt,)), *observation.ranks[1:]))


def _wrong(part: LocalArray) -> LocalArray:
    assert part.data is not None
    tensor = tensor_of(part.data)
    flat = tensor.view(-1)
    flat[flat.abs().argmax()] *= 1.001
    return replace(part, data=array_of(tensor))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

"""Engines that are wrong, unwilling or slow in one plain way, to see what becomes of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fsdp_engine.adapters.torch_fsdp import Fsdp2Trainee, TorchFsdp2
from fsdp_engine.contract.case import Case
from fsdp_engine.contract.errors import UnsupportedCase
from fsdp_engine.contract.protocol import LocalShard, RankContext, Run
from oracles.verdict import Verdict


class _Doubled(Fsdp2Trainee):
    def gradients(self) -> Iterator[LocalShard]:
        for shard in super().gradients():
            yield shard if shard.data is None else replace(shard, data=shard.data * 2)


class DoublesGradients(TorchFsdp2):
    """Reports twice the gradient."""

    def build(self, case: Case, rank: RankContext) -> Fsdp2Trainee:
        trainee = super().build(case, rank)
        trainee.__class__ = _Doubled
        return trainee


class RefusesAll(TorchFsdp2):
    """Declines every case."""

    def supports(self, case: Case) -> str | None:
        return f"not in the mood for {case.mesh.world_size} ranks"


class DeclinesOddSeeds(TorchFsdp2):
    """Finds out while it builds that it cannot, behind a collective's worth of set-up."""

    def build(self, case: Case, rank: RankContext) -> Fsdp2Trainee:
        trainee = super().build(case, rank)
        if case.seed % 2:
            raise UnsupportedCase(f"no seed {case.seed} on {rank.device}")
        return trainee


def raising_check(case: Case, run: Run) -> Verdict:  # noqa: ARG001  raises before it looks
    """A check that is broken itself."""
    raise KeyError("a mistake in the check")

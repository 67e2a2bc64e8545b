"""Whether this machine computes the same bits twice: asked once, before a session judges anything.

Replay knows a rank's local gradients to the last bit. That rests on rank processes and this one
choosing the same kernels and the same order of sums, which a library, a thread count or a device
may break. So plain FSDP2 runs a small case on two ranks in every compute dtype, where a sum of two
has one rounding only, and its gradients must be those of the replay bit for bit.

On a device with an arithmetic of its own they must be within the bound, widened by how far replays
there are apart.

The engine under test has no part in it: a faulty one could otherwise excuse itself. What the probe
does not confirm is not judged by replay: neither passed nor held against the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from fsdp_engine.contract.batch import Batch, Sequence, Static
from fsdp_engine.contract.case import Case, Dtype, DtypePolicy, EngineOptions
from fsdp_engine.contract.errors import FsdpPropertiesError
from fsdp_engine.contract.model import Model
from fsdp_engine.contract.observation import Observation
from fsdp_engine.contract.protocol import EngineTables, Run
from fsdp_engine.world.pool import WorldPool
from oracles.arrays import array_of
from oracles.assembly import assemble
from oracles.bitwise import array_mismatches
from oracles.evaluation import Evaluator
from oracles.gradients import judge, observed_gradients
from oracles.records import train_actions
from oracles.reduction import emulate
from oracles.replay import replay
from oracles.verdict import Mismatch
from properties.outcome import Worlds

Unreplayable: TypeAlias = Mapping[str, str]
"""Compute dtype to what the probe found there; a dtype that is not in it was confirmed."""

PROBE_ENGINE = "torch_fsdp2"

_POLICIES: dict[Dtype, DtypePolicy] = {
    "float32": DtypePolicy(),
    "float64": DtypePolicy(storage="float64", compute="float64", reduce="float64"),
    "bfloat16": DtypePolicy(compute="bfloat16"),
}

# Wide enough for the blocked kernels of matrix products, with rows and columns left over.
_MODEL = Model(family="embedding", units=2, width=40, hidden=72, vocab=37, bias=True)


def probe(device: str = "cpu") -> dict[str, str]:
    """Run the probe on a device; empty where replay can be relied on in every dtype."""
    found: dict[str, str] = {}
    with WorldPool(PROBE_ENGINE, device=device) as pool:
        for dtype, case in probe_cases().items():
            try:
                mismatch = first_difference(case, pool(case))
            except FsdpPropertiesError as error:
                found[dtype] = f"plain FSDP2 did not run: {str(error).splitlines()[0]}"
                continue
            if mismatch is not None:
                found[dtype] = str(mismatch)
    return found


def probe_cases() -> dict[Dtype, Case]:
    """One case for every compute dtype: two ranks, two micro-batches, all of them different."""
    ranks = tuple(
        tuple(
            Sequence(key=2 * rank + place, length=9 + rank + 5 * place, loss_tokens=4 + rank)
            for place in range(2)
        )
        for rank in range(2)
    )
    return {
        dtype: Case(
            model=_MODEL,
            dtypes=policy,
            engine=EngineOptions(planning=Static(sequences=1)),
            batches=(Batch(ranks=ranks),),
            seed=1,
        )
        for dtype, policy in _POLICIES.items()
    }


def first_difference(case: Case, observation: Observation) -> Mismatch | None:
    """The first gradient element that is not the replayed one, bit for bit or by the bound."""
    evaluator = Evaluator(case)
    if observation.numerics.device is not None:
        (shown,) = observed_gradients(evaluator, observation)
        verdict = judge(shown)
        return verdict.mismatches[0] if verdict.mismatches else None
    (action,) = train_actions(case, observation)
    assembled = assemble(
        [record.gradients for record in action.records],
        mesh=case.mesh,
        shapes=evaluator.shapes,
        where="gradient",
    )
    if assembled.mismatches:
        return assembled.mismatches[0]
    plans = [record.plan for record in action.records]
    local = replay(evaluator, action.batch, plans, observation.numerics, evaluator.weights)
    for name, got in assembled.full.items():
        candidates = emulate(local, name, observation.numerics, case.mesh)
        assert got is not None
        assert candidates is not None
        (replayed,) = candidates
        found = array_mismatches(f"gradient {name}", array_of(got), array_of(replayed))
        if found:
            return found[0]
    return None


@dataclass(frozen=True, slots=True)
class ProbedRun:
    """A run whose observations are not replayable where the probe did not confirm it."""

    run: Run
    unreplayable: Unreplayable

    def __call__(self, case: Case) -> Observation:
        observation = self.run(case)
        if observation.numerics.compute not in self.unreplayable:
            return observation
        return replace(observation, numerics=replace(observation.numerics, replayable=False))

    def tables(
        self,
        *,
        mesh_shapes: tuple[tuple[int, int], ...] = (),
        strategies: tuple[tuple[int, bool], ...] = (),
    ) -> EngineTables:
        return self.run.tables(mesh_shapes=mesh_shapes, strategies=strategies)


@dataclass(frozen=True, slots=True)
class ProbedWorlds(ProbedRun):
    """The same for warm worlds and for fresh ones."""

    run: Worlds

    @property
    def fresh(self) -> Run:
        return ProbedRun(self.run.fresh, self.unreplayable)

"""Engines that try what may go wrong with a merged adapter, where they are asked to infer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fsdp_engine.adapters.reference import Reference
from fsdp_engine.contract.actions import Export
from fsdp_engine.contract.case import Case
from fsdp_engine.contract.errors import ConfigError, EngineStateError
from fsdp_engine.contract.protocol import RankContext, TokenLoss
from fsdp_engine.engine.engine import FsdpEngine
from fsdp_engine.engine.lora import AdaptedLayer
from fsdp_engine.workload.batches import LocalBatch


class ConsumerError(Exception):
    """Raised by whoever uses the weights."""


class _Trying(Reference):
    """Calls `attempt` before it infers; parameters and flags must be as before, bit for bit."""

    def attempt(self, engine: FsdpEngine, batch: LocalBatch, loss: TokenLoss) -> None:
        raise NotImplementedError

    def build(self, case: Case, rank: RankContext) -> FsdpEngine:
        engine = super().build(case, rank)

        def infer(batch: LocalBatch, loss: TokenLoss) -> Tensor:
            engine.infer = original  # type: ignore[method-assign]
            before = _copies(engine)
            flags = [p.requires_grad for p in engine.module.parameters()]
            self.attempt(engine, batch, loss)
            assert all(map(torch.equal, before, _copies(engine)))
            assert flags == [p.requires_grad for p in engine.module.parameters()]
            return engine.infer(batch, loss)

        original = engine.infer
        engine.infer = infer  # type: ignore[method-assign]
        return engine


class RaisesInMerged(_Trying):
    """Whoever uses the merged weights raises, before and behind a forward."""

    def attempt(self, engine: FsdpEngine, batch: LocalBatch, loss: TokenLoss) -> None:
        for forwards in range(2):
            with _Raising(ConsumerError), engine.merge_adapter():
                for _ in range(forwards):
                    engine.infer(batch, loss)
                raise ConsumerError


class RaisesInMerge(_Trying):
    """The merge itself raises, at the second layer."""

    def attempt(self, engine: FsdpEngine, batch: LocalBatch, loss: TokenLoss) -> None:  # noqa: ARG002
        original = AdaptedLayer.merged
        seen = 0

        def failing(layer: AdaptedLayer, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
            nonlocal seen
            seen += 1
            if seen == 2:
                raise ConsumerError
            return original(layer, weight, a, b)

        AdaptedLayer.merged = failing  # type: ignore[method-assign,assignment]
        try:
            with _Raising(ConsumerError), engine.merge_adapter():
                raise AssertionError("merged after all")
            seen = 0
            with _Raising(ConsumerError):
                list(engine.export(Export(weights="merged")))
        finally:
            AdaptedLayer.merged = original  # type: ignore[method-assign]


class UsesMerged(_Trying):
    """Reads, trains, steps, saves and loads while the adapter is merged."""

    def attempt(self, engine: FsdpEngine, batch: LocalBatch, loss: TokenLoss) -> None:
        held = engine.export(Export())
        next(held)
        with engine.merge_adapter():
            calls: list[Callable[[], object]] = [
                lambda: engine.forward_backward(batch, loss),
                engine.step,
                lambda: engine.restore(()),
                lambda: engine.export(Export()),
                lambda: engine.save("nowhere"),
                lambda: engine.load("nowhere"),
                lambda: next(held),
            ]
            for call in calls:
                with _Raising(EngineStateError):
                    call()
            for context in (engine.merge_adapter, engine.disable_adapter):
                with _Raising(EngineStateError), context():
                    raise AssertionError("entered after all")
        assert len(list(engine.export(Export(weights="base")))) > 0


class RaisesWhileDisabled(_Trying):
    """Whoever runs without the adapter raises."""

    def attempt(self, engine: FsdpEngine, batch: LocalBatch, loss: TokenLoss) -> None:
        with _Raising(ConsumerError), engine.disable_adapter():
            off = engine.infer(batch, loss)
            with engine.disable_adapter():
                pass
            assert torch.equal(engine.infer(batch, loss), off)
            raise ConsumerError
        assert not torch.equal(engine.infer(batch, loss), off)


class Refuses(_Trying):
    """There is no adapter, or none that can be merged in place."""

    def attempt(self, engine: FsdpEngine, batch: LocalBatch, loss: TokenLoss) -> None:  # noqa: ARG002
        with _Raising(ConfigError), engine.merge_adapter():
            raise AssertionError("entered after all")
        if engine.weights.plan.adapter is None:
            with _Raising(ConfigError):
                engine.export(Export(weights="adapter"))
            with _Raising(ConfigError), engine.disable_adapter():
                raise AssertionError("entered after all")
            for action in (Export(weights="base"), Export(weights="merged")):
                names = [name for name, _ in engine.export(action)]
                assert names == [name for name, _ in engine.export(Export())]


class _Raising:
    """What runs inside must raise an error of this kind."""

    def __init__(self, kind: type[Exception]) -> None:
        self._kind = kind

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        assert kind is not None, f"no {self._kind.__name__}"
        return issubclass(kind, self._kind)


def _copies(engine: FsdpEngine) -> list[Tensor]:
    return [shard.data.clone() for shard in engine.parameters() if shard.data is not None]

"""What the engine promises of where its model and optimizer are, on one rank of the device.

They run in the process of `tests.accelerator_checks`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_engine.contract.actions import Export
from fsdp_engine.contract.case import Case, Strategy
from fsdp_engine.contract.errors import ConfigError, EngineStateError
from fsdp_engine.contract.model import Model
from fsdp_engine.engine.config import EngineConfig, OptimizerConfig
from fsdp_engine.engine.engine import FsdpEngine
from fsdp_engine.workload.batches import local_batch
from fsdp_engine.workload.losses import token_loss
from fsdp_engine.workload.models import build_model, module_arguments
from fsdp_engine.world.device import prepare
from tests.small_cases import small_case

STRATEGIES: tuple[Strategy, ...] = ("fsdp2", "fsdp1")
HOST, DEVICE = {"cpu"}, {"hpu"}


@contextmanager
def _engines(**options: Any) -> Iterator[Iterator[tuple[FsdpEngine, Case]]]:
    """An engine by each strategy, one after the other, with the case whose batch it can train."""
    device = prepare("sim")
    dist.init_process_group(device.backend(1), store=dist.HashStore(), rank=0, world_size=1)

    def built() -> Iterator[tuple[FsdpEngine, Case]]:
        for strategy in STRATEGIES:
            if strategy == "fsdp1" and options.get("offload_policy"):
                continue
            case = small_case(shape=(1,), model=Model(family="mlp", units=2), strategy=strategy)
            config = EngineConfig(strategy="fsdp" if strategy == "fsdp1" else "fsdp2", **options)
            engine = FsdpEngine(
                build_model(case),
                config,
                OptimizerConfig(),
                device=torch.device(device.torch_name(0)),
                module_arguments=lambda inputs, case=case: module_arguments(case, inputs),  # type: ignore[misc]
            )
            yield engine, case

    try:
        yield built()
    finally:
        dist.destroy_process_group()


def modes_may_be_nested() -> None:
    with _engines(param_offload=True) as engines:
        for engine, _ in engines:
            assert _places(engine) == HOST
            with engine.mode("train"):
                with engine.mode("eval"), engine.mode("train"):
                    pass
                assert _places(engine) == DEVICE
            assert _places(engine) == HOST


def an_exception_brings_everything_back() -> None:
    with _engines(param_offload=True, optimizer_offload=True) as engines:
        for engine, case in engines:
            _train(engine, case)
            with pytest.raises(ZeroDivisionError):
                _train_and_fail(engine, case)
            assert (_places(engine), _state_places(engine)) == (HOST, HOST)


def calls_outside_of_a_mode_load_for_themselves() -> None:
    with _engines(param_offload=True, optimizer_offload=True) as engines:
        for engine, case in engines:
            _forward_backward(engine, case)
            assert _places(engine) == HOST
            assert all(shard.data.device.type == "cpu" for shard in engine.gradients())  # type: ignore[union-attr]
            assert engine.step().stepped
            assert (_places(engine), _state_places(engine)) == (HOST, HOST)


def what_is_moved_rests_there_from_then_on() -> None:
    with _engines(param_offload=True) as engines:
        for engine, case in engines:
            engine.to(engine._device)
            _train(engine, case)
            assert (_places(engine), _state_places(engine)) == (DEVICE, DEVICE)
            engine.to("cpu", model=False, optimizer=True, grad=False)
            assert (_places(engine), _state_places(engine)) == (DEVICE, HOST)
            _train(engine, case)
            assert (_places(engine), _state_places(engine)) == (DEVICE, HOST)
            engine.to("cpu", optimizer=False)
            assert _places(engine) == HOST


def illegal_moves_are_refused() -> None:
    with _engines() as engines:
        for engine, _ in engines:
            for device in ("cuda", "hpu:1", "cpu:3", "nonsense"):
                with pytest.raises(ConfigError, match=f"to: '{device}' is not legal; legal is cpu"):
                    engine.to(device)
            with pytest.raises(ConfigError, match="grad=False with model=True"):
                engine.to("cpu", grad=False)
            with engine.mode("eval"), pytest.raises(EngineStateError, match="model is in use"):
                engine.to("cpu")
            assert _places(engine) == DEVICE
    with _engines(offload_policy=True) as engines:
        for engine, _ in engines:
            with pytest.raises(ConfigError, match="not legal with offload_policy"):
                engine.to("cpu")
            with pytest.raises(ConfigError, match="legal is auto or skip"):
                engine.export(Export(staging="force"))


def a_held_export_keeps_what_it_reads() -> None:
    with _engines(param_offload=True) as engines:
        for engine, case in engines:
            export = engine.export(Export(staging="force"))
            next(export)
            with engine.mode("eval"):
                engine.infer(local_batch(case, 0, 0), token_loss(case))
            assert _places(engine) == DEVICE
            with pytest.raises(EngineStateError, match="model is in use"):
                engine.to("cpu")
            assert {tensor.device.type for _, tensor in export} == DEVICE
            assert _places(engine) == HOST
            export = engine.export(Export(staging="force"))
            next(export)
            export.close()  # type: ignore[attr-defined]
            assert _places(engine) == HOST


def _train(engine: FsdpEngine, case: Case) -> None:
    with engine.mode("train"):
        _forward_backward(engine, case)
        engine.step()


def _train_and_fail(engine: FsdpEngine, case: Case) -> None:
    with engine.mode("train"):
        _forward_backward(engine, case)
        raise ZeroDivisionError


def _forward_backward(engine: FsdpEngine, case: Case) -> None:
    engine.forward_backward(local_batch(case, 0, 0), token_loss(case))


def _places(engine: FsdpEngine) -> set[str]:
    return {parameter.device.type for parameter in engine.module.parameters()}


def _state_places(engine: FsdpEngine) -> set[str]:
    return {
        shard.data.device.type
        for slot, shard in engine.optimizer_state()
        if slot != "step" and shard.data is not None
    }


CHECKS: tuple[Callable[[], None], ...] = (
    modes_may_be_nested,
    an_exception_brings_everything_back,
    calls_outside_of_a_mode_load_for_themselves,
    what_is_moved_rests_there_from_then_on,
    illegal_moves_are_refused,
    a_held_export_keeps_what_it_reads,
)

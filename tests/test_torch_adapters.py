"""Plain torch FSDP1 and FSDP2 as engines: shards that tile, right gradients, honest refusals."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fsdp_engine.adapters.torch_fsdp import TorchFsdp1, TorchFsdp2
from fsdp_engine.contract.actions import Export, Infer, Train
from fsdp_engine.contract.batch import Batch, TokenBudget
from fsdp_engine.contract.case import (
    DTYPE_POLICIES,
    Case,
    EngineOptions,
    LossMode,
    Optimizer,
    Strategy,
)
from fsdp_engine.contract.model import Family, Model
from fsdp_engine.contract.observation import (
    Array,
    ExportRecord,
    FlatRange,
    InferRecord,
    LocalArray,
    Replicate,
    Shard,
    TrainRecord,
)
from fsdp_engine.workload.batches import global_batch
from fsdp_engine.workload.losses import token_loss
from fsdp_engine.workload.models import build_model, module_arguments
from fsdp_engine.world.consumer import as_array
from fsdp_engine.world.pool import WorldPool
from tests.world_cases import world_case


@pytest.fixture(scope="module", params=["fsdp1", "fsdp2"])
def wrapper(request: pytest.FixtureRequest) -> Iterator[tuple[Strategy, WorldPool]]:
    with WorldPool(f"torch_{request.param}") as pool:
        yield request.param, pool


def tensor(array: Array) -> torch.Tensor:
    flat = torch.frombuffer(bytearray(array.data), dtype=getattr(torch, array.dtype))
    return flat.view(array.shape)


def joined(ranks: Sequence[Sequence[LocalArray]]) -> dict[str, torch.Tensor]:
    """Full tensors, every element from exactly one rank of one replica or the same on all."""
    full: dict[str, torch.Tensor] = {}
    covered: dict[str, torch.Tensor] = {}
    for parts in ranks:
        assert len({part.name for part in parts}) == len(parts)
        for part in parts:
            assert part.data is not None
            data = tensor(part.data) if part.data.data else torch.empty(part.data.shape)
            whole = full.setdefault(part.name, torch.zeros(part.full_shape, dtype=data.dtype))
            count = covered.setdefault(part.name, torch.zeros(part.full_shape))
            match part.placement:
                case FlatRange(start=start, stop=stop):
                    whole.view(-1)[start:stop] = data
                    count.view(-1)[start:stop] += 1
                case Shard(dim=dim, start=start, length=length):
                    whole.narrow(dim, start, length).copy_(data)
                    count.narrow(dim, start, length).add_(1)
                case Replicate():
                    whole.copy_(data)
                    count += 1
    for name, count in covered.items():
        assert count.min() == count.max(), f"{name} is not tiled"
    return full


def exact_case(strategy: Strategy, **fields: Any) -> Case:
    """Small integers everywhere: every sum is exact, so equality is bitwise."""
    model = Model(family="mlp", units=2, width=2, hidden=3, vocab=2, bias=True)
    defaults: dict[str, Any] = {"model": model, "exact": True, "dtypes": DTYPE_POLICIES["fp64"]}
    return world_case(strategy, **(defaults | fields))


def truth(case: Case) -> dict[str, torch.Tensor]:
    """Gradients of the sum of token losses over the global batch, times the loss mode's 1/N."""
    module = build_model(case)
    for index in range(len(case.batches[0].sequences)):
        micro_batch = global_batch(case, 0).select([index])
        output = module(**module_arguments(case, micro_batch.inputs))
        (token_loss(case)(output, micro_batch) * micro_batch.loss_mask).sum().backward()  # type: ignore[no-untyped-call]  # so in torch
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in module.named_parameters()
    }


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("reshard", [False, True])
@pytest.mark.parametrize("mesh", [(1,), (2,), (2, 2), (1, 2)])
def test_gradients_are_those_of_the_global_batch(
    wrapper: tuple[Strategy, WorldPool], mesh: tuple[int, ...], *, reshard: bool, deferred: bool
) -> None:
    strategy, pool = wrapper
    options = EngineOptions(
        strategy=strategy,
        reshard_after_forward=reshard,
        deferred=deferred,
        loss_mode="token-sum",
    )
    case = exact_case(strategy, mesh=mesh, engine=options)
    got = joined([_train(rank.records[0]).gradients for rank in pool(case).ranks])
    wanted = truth(case)
    assert set(got) == set(wanted)
    for name, gradient in wanted.items():
        assert torch.equal(got[name], gradient), name


@pytest.mark.parametrize("deferred", [False, True])
def test_flat_parameters_are_read_by_their_offsets(*, deferred: bool) -> None:
    options = EngineOptions(strategy="fsdp1", loss_mode="token-sum", deferred=deferred)
    case = exact_case("fsdp1", mesh=(3,), engine=options)
    with WorldPool("tests.engines.flat_parameters:FlatParameters") as pool:
        observation = pool(case)
    initial = joined([rank.initial for rank in observation.ranks])
    for name, parameter in build_model(case).named_parameters():
        assert torch.equal(initial[name], parameter), name
    got = joined([_train(rank.records[0]).gradients for rank in observation.ranks])
    before, after = 2.0, 1.5  # at three ranks the average is not exact: undo what FSDP1 does
    for name, gradient in truth(case).items():
        assert torch.equal(got[name], gradient * 3 / before / after), name


def test_fsdp2_averages_over_replicas_without_shards() -> None:
    options = EngineOptions(strategy="fsdp2", loss_mode="token-sum")
    case = exact_case("fsdp2", mesh=(2, 1), engine=options)
    with WorldPool("torch_fsdp2") as pool:
        got = joined([_train(rank.records[0]).gradients for rank in pool(case).ranks])
    assert all(torch.equal(got[name], gradient) for name, gradient in truth(case).items())


@pytest.mark.parametrize(
    ("family", "width", "hidden"),
    [("mlp", 5, 3), ("mlp", 1, 1), ("embedding", 3, 2), ("qwen2", 8, 6), ("mixtral", 8, 6)],
)
def test_uneven_and_empty_shards_tile_every_parameter(
    wrapper: tuple[Strategy, WorldPool], family: Family, width: int, hidden: int
) -> None:
    strategy, pool = wrapper
    tied = family != "mlp"
    model = Model(family=family, units=2, width=width, hidden=hidden, vocab=7, tied=tied)
    case = world_case(strategy, mesh=(3,), model=model, program=(Train(step=True), Infer()))
    observation = pool(case)
    wanted = {name: value.detach() for name, value in build_model(case).named_parameters()}
    got = joined([rank.initial for rank in observation.ranks])
    assert set(got) == set(wanted)
    assert all(torch.equal(got[name], value) for name, value in wanted.items())
    assert set(joined([_train(rank.records[0]).gradients for rank in observation.ranks])) == set(
        wanted
    )


@pytest.mark.parametrize("family", ["embedding", "llama"])
def test_export_yields_the_state_dict(wrapper: tuple[Strategy, WorldPool], family: Family) -> None:
    strategy, pool = wrapper
    torch_family = family == "embedding"
    model = Model(family=family, units=2, width=8, vocab=7, tied=True, buffers=torch_family)
    # The inference leaves the root gathered: what is exported must not depend on it.
    case = world_case(strategy, mesh=(2, 2), model=model, program=(Infer(), Export()))
    observation = pool(case)
    wanted = {name: as_array(value) for name, value in build_model(case).state_dict().items()}
    for rank in observation.ranks:
        record = rank.records[1]
        assert isinstance(record, ExportRecord)
        assert [exported.name for exported in record.tensors] == list(wanted)
        assert {exported.name: exported.value for exported in record.tensors} == wanted
        assert {exported.device for exported in record.tensors} == {"cpu"}
        assert record.before == record.after
        assert record.before.parameters == rank.initial


def test_inference_gives_the_losses_of_the_local_batch(
    wrapper: tuple[Strategy, WorldPool],
) -> None:
    strategy, pool = wrapper
    case = exact_case(strategy, program=(Infer(),), micro_batches=3)
    everything = global_batch(case, 0)
    for rank in pool(case).ranks:
        record = rank.records[0]
        assert isinstance(record, InferRecord)
        mine = everything.select(range(3 * rank.rank, 3 * rank.rank + 3))
        wanted = token_loss(case)(build_model(case)(**mine.inputs), mine)
        assert record.token_losses == as_array(wanted)


@pytest.mark.parametrize(
    "loss_mode", ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean"]
)
def test_a_token_budget_gives_all_ranks_the_same_number_of_micro_batches(
    wrapper: tuple[Strategy, WorldPool], loss_mode: LossMode
) -> None:
    strategy, pool = wrapper
    options = EngineOptions(
        strategy=strategy, planning=TokenBudget(max_tokens=5), loss_mode=loss_mode
    )
    case = world_case(strategy, micro_batches=3, engine=options)
    records = [_train(rank.records[0]) for rank in pool(case).ranks]
    assert len({len(record.plan) for record in records}) == 1
    for record in records:
        assert sorted(index for part in record.plan for index in part) == [0, 1, 2]
        assert all(record.plan)
        assert math.isfinite(record.total_loss)


def test_a_step_moves_the_parameters_by_the_clipped_gradient(
    wrapper: tuple[Strategy, WorldPool],
) -> None:
    strategy, pool = wrapper
    optimizer = Optimizer(clip_grad=float(1 << 20), lr=0.5, warmup_steps=4)
    case = exact_case(
        strategy,
        program=(Train(step=True), Train(step=True)),
        optimizer=optimizer,
        dtypes=DTYPE_POLICIES["fp32"],
        engine=EngineOptions(strategy=strategy, loss_mode="token-sum"),
    )
    observation = pool(case)
    first, second = (
        [_train(rank.records[index]) for rank in observation.ranks] for index in (0, 1)
    )
    assert {record.lr for record in first} == {0.125}
    assert {record.lr for record in second} == {0.25}
    assert all(record.stepped for record in first)
    start = joined([record.parameters for record in first])  # the first step has lr 0
    assert all(
        torch.equal(start[name], value) for name, value in build_model(case).named_parameters()
    )
    gradients = joined([record.gradients for record in second])
    moved = joined([record.parameters for record in second])
    for name, gradient in gradients.items():
        assert torch.equal(moved[name], start[name] - 0.125 * gradient), name
    norms = {record.norm for record in second}
    assert len(norms) == 1
    squared = sum(float((gradient * gradient).sum()) for gradient in gradients.values())
    assert np.float32(norms.pop()) == pytest.approx(math.sqrt(squared), rel=1e-6)


def test_what_a_wrapper_cannot_do_is_refused_with_the_reason() -> None:
    one, two = TorchFsdp1(), TorchFsdp2()
    assert "fsdp2" in str(one.supports(world_case("fsdp2")))
    assert "fsdp1" in str(two.supports(world_case("fsdp1")))
    optional = Model(family="mlp", units=2, optional="unit")
    uniform = world_case("fsdp2", model=optional)
    assert two.supports(uniform) is None
    skipped = tuple(replace(sequence, gated=False) for sequence in uniform.batches[0].ranks[1])
    uneven = (Batch(ranks=(uniform.batches[0].ranks[0], skipped)),)
    assert "unit" in str(two.supports(replace(uniform, batches=uneven)))
    parameter = replace(optional, optional="parameter")
    assert two.supports(replace(uniform, batches=uneven, model=parameter)) is None
    yaml = EngineOptions(strategy="fsdp2", config_source="yaml")
    assert "configuration" in str(two.supports(world_case("fsdp2", engine=yaml)))


def _train(record: object) -> TrainRecord:
    assert isinstance(record, TrainRecord)
    return record

"""What the simulated device must do, one function each; run together in a process of their own.

`python -m tests.accelerator_checks` prints a JSON object: function to traceback, empty where it
passed. A process that has installed the device is of no use for anything else.
"""

from __future__ import annotations

import copy
import io
import json
import pickle
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_engine.adapters.numerics import fsdp2_numerics
from fsdp_engine.contract.errors import AcceleratorError
from fsdp_engine.contract.model import Model
from fsdp_engine.workload.models import build_model
from fsdp_engine.world.accelerator.device import install
from fsdp_engine.world.accelerator.ledger import Copy, site
from oracles.arrays import same_bits
from oracles.evaluation import Evaluator
from oracles.replay import replay
from tests import operator_checks, residency_checks, schedule_checks
from tests.operator_checks import DEVICE, require_same
from tests.small_cases import small_case


def operands_on_two_devices_are_refused() -> None:
    here, there = torch.ones(3), torch.ones(3, device=DEVICE)
    for operation in (torch.add, torch.mul, torch.dot, torch.eq):
        with pytest.raises(RuntimeError, match="two devices, hpu:0 and cpu"):
            operation(there, here)
    with pytest.raises(RuntimeError, match="two devices"):
        nn.Linear(3, 2)(there)
    assert torch.equal((there + torch.tensor(1.0)).cpu(), here + 1)  # a scalar may be anywhere
    assert torch.equal(there[torch.tensor([0, 2])].cpu(), here[:2])  # and so may indices


def copies_are_in_the_ledger() -> None:
    ledger = install().ledger
    here = torch.ones(3, 2)
    ledger.take()
    there = here.to(DEVICE, non_blocking=True)
    there.cpu()
    there.clone()
    there.to(torch.bfloat16).to("cpu")
    assert ledger.take() == (
        _copy("host_to_device", 24, blocking=False),
        _copy("device_to_host", 24),
        _copy("device_to_device", 24),
        _copy("device_to_device", 12, dtype="BFloat16"),
        _copy("device_to_host", 12, dtype="BFloat16"),
    )
    here.clone()
    (there * 2).sum()
    assert ledger.take() == ()


def implicit_copies_are_in_the_ledger() -> None:
    ledger = install().ledger
    there = torch.ones(3, device=DEVICE)
    ledger.take()
    reads: tuple[Callable[[], object], ...] = (
        lambda: there[0].item(),
        lambda: bool(there.sum() > 0),
        lambda: float(there[1]),
    )
    for read in reads:
        read()
        assert [copy.implicit for copy in ledger.take()] == [True]
    str(there)
    assert any(copy.direction == "device_to_host" for copy in ledger.take())


def copies_name_their_site() -> None:
    ledger = install().ledger
    ledger.take()
    with ledger.labelled(site):
        torch.ones(2).to(DEVICE)
    torch.ones(2).to(DEVICE)
    sited, other = ledger.take()
    assert "accelerator_checks.py" in sited.label
    assert sited.label.endswith("in copies_name_their_site")
    assert other.label == ""


def memory_is_counted_to_the_byte() -> None:
    device = install()
    before = device.memory_allocated
    device.reset_peak()
    x = torch.ones(100, device=DEVICE)
    y = x[10:] + 1
    z = x.view(10, 10).t()
    assert device.memory_allocated == before + 400 + 360
    del y, x
    assert device.memory_allocated == before + 400  # the view holds it
    del z
    assert device.memory_allocated == before
    assert device.max_memory_allocated == before + 760
    assert _hpu().max_memory_allocated() == before + 760
    _hpu().reset_peak_memory_stats()
    assert device.max_memory_allocated == before


def a_storage_resized_to_nothing_is_freed() -> None:
    device = install()
    before = device.memory_allocated
    x = torch.ones(100, device=DEVICE)
    x.untyped_storage().resize_(0)
    assert device.memory_allocated == before
    x.untyped_storage().resize_(400)
    assert device.memory_allocated == before + 400
    assert bool(x.isnan().all())  # what was there is gone


def memory_that_nobody_wrote_is_poison() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        for made in (
            torch.empty(5, dtype=dtype, device=DEVICE),
            torch.empty_strided((2, 2), (2, 1), dtype=dtype, device=DEVICE),
            torch.ones(5, dtype=dtype, device=DEVICE).resize_(9)[5:],
        ):
            assert bool(made.isnan().all())


def a_full_device_raises_as_a_gpu_does() -> None:
    device = install()
    with device.limited(device.memory_allocated + 1000):
        free, total = _hpu().mem_get_info()
        assert (free, total) == (1000, device.memory_allocated + 1000)
        x = torch.ones(200, device=DEVICE)
        with pytest.raises(torch.OutOfMemoryError, match="800 bytes asked for"):
            torch.ones(200, device=DEVICE)
        with pytest.raises(torch.OutOfMemoryError):
            x + 1
        del x
        torch.ones(200, device=DEVICE)
    torch.ones(10_000, device=DEVICE)


def data_can_be_exchanged_across_devices() -> None:
    parameter = nn.Parameter(torch.ones(3))
    parameter.data = parameter.data.to(DEVICE)
    assert parameter.device.type == DEVICE
    parameter.data = parameter.data.cpu()
    assert parameter.device.type == "cpu"
    assert torch.equal(parameter.data, torch.ones(3))


def in_place_out_and_resize_reach_the_tensor_itself() -> None:
    x = torch.zeros(2, 3, device=DEVICE)
    x[1].add_(1).mul_(2)
    assert x.cpu().tolist() == [[0] * 3, [2] * 3]
    out = torch.empty(0, device=DEVICE)
    assert torch.add(x, x, out=out) is out
    assert out.cpu().tolist() == [[0] * 3, [4] * 3]
    fitting = torch.zeros(3, device=DEVICE)
    torch.sum(x, 0, out=fitting)
    assert fitting.cpu().tolist() == [2] * 3
    x.resize_(4, 3)
    assert x.shape == (4, 3)
    assert x[:2].cpu().tolist() == [[0] * 3, [2] * 3]
    first, second = x[:1], x[1:2]
    first.copy_(second)
    assert x[0].cpu().tolist() == [2] * 3


def modules_and_optimizers_step_alike() -> None:
    for make in (
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.AdamW(parameters, foreach=True),
        lambda parameters: torch.optim.AdamW(parameters, foreach=False),
    ):
        here = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.LayerNorm(7), nn.Linear(7, 2))
        there = copy.deepcopy(here).to(DEVICE)
        optimizers = make(here.parameters()), make(there.parameters())
        for seed in range(3):
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))
            here(x).square().sum().backward()
            there(x.to(DEVICE)).square().sum().backward()
            for model in (here, there):
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        require_same("parameters", list(there.parameters()), list(here.parameters()))


def a_language_model_trains_alike() -> None:
    model = Model(family="qwen2", units=2, lora_rank=2)
    here: Any = build_model(small_case(shape=(1,), model=model))
    there = copy.deepcopy(here).to(DEVICE)
    ids = torch.arange(4).view(2, 2)
    for autocast in (False, True):
        losses = []
        for model, device in ((here, "cpu"), (there, DEVICE)):
            with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
                losses.append(model(input_ids=ids.to(device), labels=ids.to(device)).loss)
            losses[-1].backward()
        assert losses[0].item() == losses[1].item()
        for name, parameter in here.named_parameters():
            require_same(name, there.get_parameter(name).grad, parameter.grad)


def tensors_are_saved_and_pickled() -> None:
    here = nn.Linear(3, 2)
    there = copy.deepcopy(here).to(DEVICE)
    file = io.BytesIO()
    torch.save(there.state_dict(), file)
    for where in (None, "cpu"):
        file.seek(0)
        loaded = torch.load(file, map_location=where)
        assert {value.device.type for value in loaded.values()} == {where or DEVICE}
        require_same("saved", [v.to(DEVICE) for v in loaded.values()], list(here.parameters()))
    require_same("pickled", pickle.loads(pickle.dumps(there.weight)), here.weight)


def distributed_checkpoints_are_written_and_read() -> None:
    from torch.distributed import checkpoint

    there = nn.Linear(3, 2).to(DEVICE)
    kept = {name: value.cpu().clone() for name, value in there.state_dict().items()}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(there.state_dict(), checkpoint_id=folder, no_dist=True)
        with torch.no_grad():
            for parameter in there.parameters():
                parameter.zero_()
        checkpoint.load(there.state_dict(), checkpoint_id=folder, no_dist=True)
    require_same("loaded", list(there.state_dict().values()), list(kept.values()))


def streams_and_events_are_there() -> None:
    stream, event = _hpu().Stream(), _hpu().Event()
    assert _hpu().current_stream() == _hpu().default_stream()
    with _hpu().stream(stream):
        assert _hpu().current_stream() == stream
        assert event.record() is event
    assert _hpu().current_stream() == _hpu().default_stream()
    _hpu().current_stream().wait_event(event)
    event.synchronize()
    assert event.query()


def random_numbers_are_those_of_the_cpu() -> None:
    torch.manual_seed(3)
    here = torch.randn(4), torch.rand(4), torch.randperm(5)
    torch.manual_seed(3)
    there = (
        torch.randn(4, device=DEVICE),
        torch.rand(4, device=DEVICE),
        torch.randperm(5, device=DEVICE),
    )
    require_same("random", there, here)


def a_second_install_changes_nothing() -> None:
    assert install() is install()
    assert torch.accelerator.current_accelerator() == torch.device(DEVICE)


def _hpu() -> Any:
    return torch.get_device_module(DEVICE)


def _copy(direction: Any, num_bytes: int, *, dtype: str = "Float", blocking: bool = True) -> Copy:
    return Copy(
        direction=direction, num_bytes=num_bytes, dtype=dtype, blocking=blocking, implicit=False
    )


def gradients_are_replayed_there() -> None:
    """What is asked of a GPU: weights, buffers and data go there, results come back."""
    for family in ("mlp", "embedding", "qwen2", "mixtral"):
        for policy in ("fp32", "fp32/bf16/fp32"):
            case = small_case(shape=(1,), model=Model(family=family), policy=policy)
            evaluator, numerics = Evaluator(case), fsdp2_numerics(case)
            host, there = (
                replay(evaluator, 0, [[[0], [1]]], declared, evaluator.weights)
                for declared in (numerics, replace(numerics, device=DEVICE))
            )
            assert there.spread == {}
            assert there.losses == host.losses
            for one, other in zip(host.reduced[0], there.reduced[0], strict=True):
                assert one.keys() == other.keys()
                assert all(same_bits(one[name], other[name]) for name in one)


CHECKS: tuple[Callable[[], None], ...] = (
    *operator_checks.CHECKS,
    operands_on_two_devices_are_refused,
    copies_are_in_the_ledger,
    implicit_copies_are_in_the_ledger,
    copies_name_their_site,
    memory_is_counted_to_the_byte,
    a_storage_resized_to_nothing_is_freed,
    memory_that_nobody_wrote_is_poison,
    a_full_device_raises_as_a_gpu_does,
    data_can_be_exchanged_across_devices,
    in_place_out_and_resize_reach_the_tensor_itself,
    modules_and_optimizers_step_alike,
    a_language_model_trains_alike,
    gradients_are_replayed_there,
    tensors_are_saved_and_pickled,
    distributed_checkpoints_are_written_and_read,
    streams_and_events_are_there,
    random_numbers_are_those_of_the_cpu,
    a_second_install_changes_nothing,
    *schedule_checks.CHECKS,
    *residency_checks.CHECKS,
)


def main() -> None:
    """Run every check; a failure does not keep the next one from running."""
    warnings.simplefilter("ignore")
    try:
        install()
    except AcceleratorError as error:
        sys.stdout.write(json.dumps({"refused": str(error)}))
        return
    found = {}
    for check in CHECKS:
        try:
            check()
            found[check.__name__] = ""
        except Exception:  # noqa: BLE001  each is told
            found[check.__name__] = traceback.format_exc()
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()

"""What the simulated device must do while it is asynchronous, one function each.

They run in the process of `tests.accelerator_checks`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fsdp_engine.world.accelerator.device import install

DEVICE = "hpu"


def work_of_another_stream_is_there_once_it_is_waited_for() -> None:
    for seed in range(3):
        with install().scheduled(seed) as races:
            x = torch.ones(4, device=DEVICE)
            stream = _hpu().Stream()
            stream.wait_stream(_hpu().current_stream())
            with _hpu().stream(stream):
                y = x * 2
            _hpu().current_stream().wait_stream(stream)
            z = y + 1
            assert z.cpu().tolist() == [3.0] * 4
            del y
        assert races == []


def a_forgotten_wait_gives_poison() -> None:
    with install().scheduled(0) as races:
        x = torch.ones(4, device=DEVICE)
        stream = _hpu().Stream()
        stream.wait_stream(_hpu().current_stream())
        with _hpu().stream(stream):
            y = x * 2
        z = y + 1
        assert bool(z.cpu().isnan().all())
        _hpu().synchronize()
        assert (y + 1).cpu().tolist() == [3.0] * 4
    (race,) = races
    assert race.startswith("aten::add reads on stream")


def a_write_out_of_order_gives_poison() -> None:
    with install().scheduled(0) as races:
        x = torch.ones(4, device=DEVICE)
        with _hpu().stream(_hpu().Stream()):
            x.add_(1)
        _hpu().synchronize()
        assert bool(x.cpu().isnan().all())
    assert any("aten::add_ writes on stream" in race for race in races)


def a_schedule_may_be_lucky() -> None:
    def forgotten(seed: int) -> tuple[bool, int]:
        with install().scheduled(seed) as races:
            with _hpu().stream(_hpu().Stream()):
                y = torch.ones(4, device=DEVICE) * 2
            lucky = not bool((y + 1).cpu().isnan().any())
        return lucky, len(races)

    outcomes = [forgotten(seed) for seed in range(12)]
    assert outcomes == [forgotten(seed) for seed in range(12)]
    assert outcomes[0][0] is False
    assert {lucky for lucky, _ in outcomes} == {True, False}
    assert {number for _, number in outcomes} == {1}  # a race is told whatever its luck


def events_order_streams_and_the_host() -> None:
    with install().scheduled(0) as races:
        first, second = _hpu().Stream(), _hpu().Stream()
        with _hpu().stream(first):
            x = torch.ones(4, device=DEVICE) * 3
            event = _hpu().Event().record()
        with _hpu().stream(second):
            second.wait_event(event)
            y = x + 1
        event = second.record_event()
        event.synchronize()
        assert y.cpu().tolist() == [4.0] * 4  # what the host has waited for comes before its calls
        with _hpu().stream(first):
            z = x * 2
        assert z[0].item() != 6.0
    assert len(races) == 1  # nobody waited for `first` a second time


def a_copy_to_the_host_arrives_when_it_is_waited_for() -> None:
    with install().scheduled(0) as races:
        there = torch.ones(4, device=DEVICE)
        here = there.to("cpu", non_blocking=True)
        assert bool(here.isnan().all())
        _hpu().current_stream().synchronize()
        assert here.tolist() == [1.0] * 4
        late = there.to("cpu", non_blocking=True)
        blocking = there.cpu()
        assert blocking.tolist() == late.tolist() == [1.0] * 4  # in the order of the stream
    assert races == []


def a_stream_takes_back_what_it_sent_to_the_host() -> None:
    """In the order of its work; another stream, or the host, has to wait."""
    device, other = install(), _hpu().Stream()
    for pinned in (False, True):
        with device.scheduled(0) as races:
            sent = torch.empty(4, pin_memory=pinned)
            sent.copy_(torch.ones(4, device=DEVICE), non_blocking=True)
            back = sent.to(DEVICE, non_blocking=True)
            assert sent.isnan().all()
            with _hpu().stream(other):
                early = sent.to(DEVICE, non_blocking=True)
            _hpu().synchronize()
            assert torch.equal(back.cpu(), torch.ones(4))
            assert early.cpu().isnan().all()
        assert len(races) == pinned


def pinned_memory_must_be_left_alone() -> None:
    here = torch.ones(4).pin_memory()
    assert here.is_pinned()
    assert not torch.ones(4).is_pinned()
    with install().scheduled(0) as races:
        there = here.to(DEVICE, non_blocking=True)
        _hpu().synchronize()
        here.zero_()
        assert there.cpu().tolist() == [1.0] * 4
    assert races == []
    with install().scheduled(0) as races:
        here.to(DEVICE, non_blocking=True)
        here.fill_(2.0)
        _hpu().synchronize()
    assert races == ["pinned host memory was changed before a copy from it was waited for"]


def memory_that_is_freed_in_use_is_a_race() -> None:
    for recorded in (False, True):
        with install().scheduled(0) as races:
            x = torch.ones(4, device=DEVICE)
            stream = _hpu().Stream()
            stream.wait_stream(_hpu().current_stream())
            with _hpu().stream(stream):
                x * 2
            if recorded:
                x.record_stream(stream)
            del x
            torch.empty(4, device=DEVICE)
        assert [("is freed and used again" in race) for race in races] == [True] * (not recorded)


def training_is_in_order() -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.LayerNorm(7), nn.Linear(7, 2)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    for seed in range(3):
        with install().scheduled(seed) as races:
            model(torch.ones(4, 5, device=DEVICE)).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        assert races == []


def _hpu() -> Any:
    return torch.get_device_module(DEVICE)


CHECKS: tuple[Callable[[], None], ...] = (
    work_of_another_stream_is_there_once_it_is_waited_for,
    a_forgotten_wait_gives_poison,
    a_write_out_of_order_gives_poison,
    a_schedule_may_be_lucky,
    events_order_streams_and_the_host,
    a_copy_to_the_host_arrives_when_it_is_waited_for,
    a_stream_takes_back_what_it_sent_to_the_host,
    pinned_memory_must_be_left_alone,
    memory_that_is_freed_in_use_is_a_race,
    training_is_in_order,
)

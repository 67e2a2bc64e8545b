"""Memory, copies, places and the order of work on a device that is not the host."""

from __future__ import annotations

from fsdp_engine.contract.case import Case
from properties.checks import device, offload
from properties.judge import Judge
from properties.strategies.cases import exporting_cases, inferring_cases, stepping_cases
from properties.strategies.offload import large, offloaded, residing_cases
from properties.strategies.regions import with_predicted_bytes, with_predicted_peaks
from properties.suite import over_rows


@over_rows(offloaded(stepping_cases), where=with_predicted_bytes, on_device=("sim",))
def test_memory(case: Case, judge: Judge) -> None:
    judge(device.memory_matches, case)


@over_rows(
    offloaded(large(stepping_cases)), where=with_predicted_peaks, on_device=("sim",), times=2
)
def test_peaks(case: Case, judge: Judge) -> None:
    judge(device.peaks_match, case)


@over_rows(offloaded(exporting_cases), on_device=("sim",))
def test_copies(case: Case, judge: Judge) -> None:
    judge(device.copies_are_needed, case)


@over_rows(offloaded(inferring_cases), on_device=("sim",))
def test_order(case: Case, judge: Judge) -> None:
    judge(device.order_is_kept, case)


@over_rows(residing_cases, on_device=("sim", "cuda"), times=2)
def test_residency_at_rest(case: Case, judge: Judge) -> None:
    judge(offload.rests_where_asked, case)


@over_rows(residing_cases, on_device=("sim", "cuda"))
def test_residency_changes_nothing(case: Case, judge: Judge) -> None:
    judge(offload.offload_changes_nothing, case)

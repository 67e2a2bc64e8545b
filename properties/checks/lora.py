"""Adapters: base and adapter sent apart make the merged model, and forwards can do without one."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from fsdp_engine.contract.actions import Export, Infer
from fsdp_engine.contract.case import Case
from fsdp_engine.contract.observation import ExportRecord, TrainRecord
from fsdp_engine.contract.protocol import Run
from fsdp_engine.workload.models import state_names, trained_names
from oracles.adapters import base_case, base_tensors, merged_weights
from oracles.arrays import array_of, tensor_of
from oracles.bitwise import array_mismatches
from oracles.evaluation import Evaluator, Weights
from oracles.export import predict_initial, predict_trained
from oracles.findings import Findings
from oracles.inference import judge_inference
from oracles.metamorphic import told_mismatches
from oracles.moments import Moment, moments
from oracles.taking import judge_bounded, writes
from oracles.verdict import NOT_REPLAYABLE, Mismatch, Verdict, combine, exactly, not_applicable

_NO_ADAPTER = "the model has no adapter"


def two_phase_equals_merged(case: Case, run: Run) -> Verdict:
    """What a consumer makes of the exported base and the exported adapter is the merged export.

    Within the rounding bound of adding them; bit for bit where no adapter is, or where its scaling
    is zero. Base and adapter together are the whole model, and every part of the adapter has a
    weight to be added to. Judged on every rank, for exports without a write between them.
    """
    if not case.model.lora_rank:
        return not_applicable(_NO_ADAPTER)
    observation = run(case)
    findings = Findings()
    num_judged = 0
    latest: dict[str, Moment] = {}
    for moment in moments(Evaluator(case), observation):
        if writes(moment):
            latest.clear()
        if _is_plain_export(moment):
            assert isinstance(moment.action, Export)
            latest[moment.action.weights] = moment
        if latest.keys() >= {"base", "adapter", "merged"}:
            for rank in range(len(observation.ranks)):
                _judge_phases(case, latest, rank, findings)
            latest.clear()
            num_judged += 1
    if not num_judged:
        return not_applicable("the program does not export base, adapter and merged weights")
    return findings.verdict("rigorous")


def switch_matches_oracle(case: Case, run: Run) -> Verdict:
    """Inference without the adapter is that of the model it was put on, bit for bit.

    With the adapter merged it is, bit for bit, that model's at the merged weights that the engine
    exported last, if weights were not written since. All of the adapter trains afterwards.
    """
    if not case.model.lora_rank:
        return not_applicable(_NO_ADAPTER)
    if not any(isinstance(action, Infer) and action.adapter != "on" for action in case.program):
        return not_applicable("no inference without the adapter, or with it merged")
    observation = run(case)
    if not observation.numerics.replayable:
        return not_applicable(NOT_REPLAYABLE)
    evaluator = Evaluator(case)
    plain = Evaluator(base_case(case))
    plain.keep_buffers(base_tensors(case, predict_initial(case).tensors))
    verdicts: list[Verdict] = []
    merged: Weights | None = None
    for moment in moments(evaluator, observation):
        if writes(moment):
            merged = None
        if _is_plain_export(moment, "merged"):
            merged = _tensors(moment, 0)
        if isinstance(moment.action, Infer):
            whole = predict_trained(case, moment.before.weights).tensors
            off = base_tensors(case, whole)
            weights = {"on": None, "off": off, "merged": merged}[moment.action.adapter]
            if weights is not None and weights.keys() >= plain.weights.keys():
                at = replace(moment, before=replace(moment.before, weights=dict(weights)))
                batch = moment.action.batch
                verdicts.append(judge_inference(plain, observation.numerics, at, batch))
        verdicts.append(exactly([*_untrained(case, moment), *moment.mismatches]))
    return combine(*verdicts)


def _untrained(case: Case, moment: Moment) -> list[Mismatch]:
    """Parts of the adapter without a gradient."""
    names = trained_names(case.model)
    return [
        Mismatch(where=f"{moment} rank {rank} gradient {part.name}", got="absent", wanted="present")
        for rank, record in enumerate(moment.records)
        if isinstance(record, TrainRecord)
        for part in record.gradients
        if part.name in names and part.data is None
    ]


def _is_plain_export(moment: Moment, *weights: str) -> bool:
    """Whether all of the weights were taken, by the names of the model."""
    action = moment.action
    if not isinstance(action, Export) or action.drain != "full" or action.unfuse:
        return False
    return not weights or action.weights in weights


def _tensors(moment: Moment, rank: int) -> dict[str, Tensor]:
    record = moment.records[rank]
    assert isinstance(record, ExportRecord)
    return {tensor.name: tensor_of(tensor.value) for tensor in record.tensors}


def _judge_phases(case: Case, latest: dict[str, Moment], rank: int, findings: Findings) -> None:
    base, adapter = _tensors(latest["base"], rank), _tensors(latest["adapter"], rank)
    moment = latest["merged"]
    record = moment.records[rank]
    assert isinstance(record, ExportRecord)
    where = f"{moment} rank {rank}"
    names = [tensor.name for tensor in record.tensors]
    findings.include(told_mismatches(f"{where} names", sorted(names), sorted(base)), 0.0)
    bounds = merged_weights(case, base, adapter)
    whole = len(state_names(case.model))
    findings.include(told_mismatches(f"{where} tensors", len(base) + len(adapter), whole), 0.0)
    if case.model.lora_alpha:
        told = f"{where} parts of the adapter that have a weight"
        findings.include(told_mismatches(told, 2 * len(bounds), len(adapter)), 0.0)
    for tensor in record.tensors:
        place = f"{where} {tensor.name}, base and adapter against merged"
        if tensor.name in bounds:
            judge_bounded(place, tensor, base[tensor.name], bounds[tensor.name], findings)
        elif tensor.name in base:
            wanted = array_of(base[tensor.name])
            findings.include(array_mismatches(place, tensor.value, wanted), 0.0)

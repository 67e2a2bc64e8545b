"""Cases in which verl does wrong: the predicates of `properties.issues.verl`."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor

from fsdp_engine.contract.actions import (
    BATCH_ACTIONS,
    Eval,
    Export,
    Infer,
    Interrupt,
    Load,
    Reject,
    Restore,
    Resume,
    Train,
    ability_for,
    asks_for_step,
)
from fsdp_engine.contract.batch import TokenBudget
from fsdp_engine.contract.case import Case
from fsdp_engine.workload.models import build_model
from properties.issues import programs, usage

LONG = 64
"""So many positions that rounded angles differ in many of them."""


def any_case(case: Case) -> bool:  # noqa: ARG001  a table has no part in a case
    """A question that is not about a case."""
    return True


def overrides(case: Case) -> bool:
    """Raw configuration fields are set."""
    return bool(case.engine.overrides)


def accumulates_low(case: Case) -> bool:
    """Deferred gradients of a coarser dtype than that of their reduction."""
    differ = case.dtypes.compute != case.dtypes.reduce
    return differ and usage.accumulates(case, unknown=True)


def surely_accumulates_low(case: Case) -> bool:
    """The same with two micro-batches that have loss, and a gradient of many elements."""
    return accumulates_low(case) and programs.surely_rounds_a_sum(case)


def exports(case: Case, *weights: str) -> bool:
    """Some export is of these weights."""
    return any(isinstance(a, Export) and a.weights in weights for a in case.program)


def merges_wide(case: Case) -> bool:
    """Merged weights are exported that are stored wider than in bf16."""
    return case.dtypes.storage == "float32" and exports(case, "merged")


def surely_merges_wide(case: Case) -> bool:
    """The same of weights that are in parts, and something is taken of it."""
    in_parts = case.engine.strategy == "fsdp2" or case.mesh.shards > 1
    return merges_wide(case) and in_parts and takes_of_each(case)


def takes_of_each(case: Case) -> bool:
    """Something is taken of every export."""
    apart = (action for action in case.program if isinstance(action, Export))
    return all(action.drain == "full" or action.after > 0 for action in apart)


def is_merged_meanwhile(case: Case) -> bool:
    """An export of merged weights is begun and held while other actions run."""
    held = (a for a in case.program if isinstance(a, Export) and a.drain == "hold" and a.after)
    return any(action.weights == "merged" for action in held)


def surely_is_merged_meanwhile(case: Case) -> bool:
    """The same first of all, of an adapter that moves the weights of units."""
    first = is_merged_meanwhile(replace(case, program=case.program[:1]))
    return first and _adapts_units(case) and case.model.lora_alpha > 0 and not case.exact


def merges(case: Case) -> bool:
    """The adapter is merged, for inference or for an export."""
    inference = any(getattr(action, "adapter", "") == "merged" for action in case.program)
    return inference or exports(case, "merged")


def merges_root(case: Case) -> bool:
    """An adapter of the root's own layers is merged."""
    on_root = case.model.lora_targets in ("root", "all")
    return on_root and merges(case)


def surely_merges_root(case: Case) -> bool:
    """The same in the storage dtype of the export, with a scale above zero, taken to its end."""
    whole = all(a.drain == "full" for a in case.program if isinstance(a, Export))
    narrow = case.dtypes.storage == "bfloat16" and case.model.lora_alpha > 0
    return merges_root(case) and whole and narrow and exports(case, "merged")


def adapts_embedding_of_transformers(case: Case) -> bool:
    """The adapter of an untied language model is on its embedding."""
    model = case.model
    on_root = model.lora_targets in ("root", "all")
    return model.is_language and on_root and not model.tied and bool(model.lora_rank)


def exports_adapter(case: Case) -> bool:
    """The adapter of units is exported alone, and all of it is taken."""
    return case.model.lora_targets != "root" and any(
        isinstance(a, Export) and a.weights == "adapter" and a.drain == "full" for a in case.program
    )


def surely_exports_apart(case: Case) -> bool:
    """Base or adapter is exported, and all of it is taken."""
    apart = (a for a in case.program if isinstance(a, Export) and a.weights in ("base", "adapter"))
    return any(action.drain == "full" for action in apart)


def surely_merges_on_the_device(case: Case) -> bool:
    """Merged weights are exported from the device, and something is taken of each."""
    return exports(case, "merged") and not case.engine.param_offload and takes_of_each(case)


def offloads_buffers(case: Case) -> bool:
    """Parameters rest on the host, of a model that has buffers."""
    return case.engine.param_offload and (case.model.buffers or case.model.is_language)


def is_interrupted_gathered(case: Case) -> bool:
    """An exception ends a forward or a backward, and shards are offloaded behind it."""
    offloads = case.engine.param_offload and case.mesh.shards > 1
    return offloads and any(isinstance(action, Interrupt) for action in case.program)


def surely_is_interrupted_gathered(case: Case) -> bool:
    """The same in a batch's first forward, first of all."""
    return is_interrupted_gathered(case) and _interrupts_first_forward(case)


def is_interrupted_unresharded(case: Case) -> bool:
    """An exception ends a forward that reshards nothing, and the module is offloaded behind it."""
    interrupts = (action for action in case.program if isinstance(action, Interrupt))
    offloads = case.engine.param_offload and not case.engine.reshard_after_forward
    return offloads and any(action.phase == "forward" for action in interrupts)


def surely_is_interrupted_unresharded(case: Case) -> bool:
    """The same in a batch's first forward, first of all."""
    return is_interrupted_unresharded(case) and _interrupts_first_forward(case)


def resumes_behind_write(case: Case) -> bool:
    """An export is held while weights are written, and taken on."""
    held = written = False
    for action in case.program:
        if isinstance(action, Export) and action.drain == "hold":
            held, written = True, False
        elif isinstance(action, Resume):
            if held and written:
                return True
            held = False
        written |= asks_for_step(action) or isinstance(action, Restore | Load)
    return False


def surely_resumes_behind_write(case: Case) -> bool:
    """Nothing but an export that is held, a step that moves the weights, and the rest."""
    kinds = [action.kind for action in case.program]
    steps = any(isinstance(action, Train) and action.step for action in case.program)
    moves = case.optimizer.lr * min(1.0, case.optimizer.clip_grad) >= 2.0**-9
    moves = moves and not case.optimizer.warmup_steps and case.dtypes.storage == "float32"
    plain = programs.is_alive(case) and programs.never_frozen(case)
    return kinds == ["export", "train", "resume"] and steps and moves and plain


def breaks_base(case: Case) -> bool:
    """The base is exported, and some rank holds only a part of it."""
    return case.mesh.shards > 1 and exports(case, "base")


def goes_on_elsewhere(case: Case) -> bool:
    """A checkpoint is loaded on another mesh or by another strategy."""
    return any(ability_for(action) == "reshard" for action in case.program)


def changes_mesh(case: Case) -> bool:
    """A checkpoint is loaded on another mesh."""
    meshes = {a.shape for a in case.program if isinstance(a, Load) and a.shape}
    return bool(meshes - {case.mesh.shape})


def rejects(case: Case, *damages: str) -> bool:
    """A checkpoint with such damage is loaded."""
    return any(isinstance(a, Reject) and a.damage in damages for a in case.program)


def leaves_others_waiting(case: Case) -> bool:
    """One of several ranks cannot read its part of the checkpoint."""
    return case.mesh.world_size > 1 and rejects(case, "missing", "truncated")


def plans_by_tokens(case: Case) -> bool:
    """Ranks plan their micro-batches by tokens."""
    return isinstance(case.engine.planning, TokenBudget) and case.mesh.world_size > 1


def asks_too_many(case: Case) -> bool:
    """The fullest rank needs more micro-batches than the emptiest has groups."""
    planning = case.engine.planning
    if not isinstance(planning, TokenBudget) or not programs.trains(case):
        return False
    batches = [case.batches[action.batch] for action in usage.training(case)]
    return any(
        max(-(-sum(s.length for s in rank) // planning.max_tokens) for rank in batch.ranks)
        > min(len(rank) // planning.group for rank in batch.ranks)
        for batch in batches
    )


def turns_by_rounded_angles(case: Case) -> bool:
    """Positions are turned by other angles, as bf16 sees them, where frequencies are in bf16."""
    if case.dtypes.storage != "bfloat16" or not case.model.is_language:
        return False
    frequencies = _rotary_frequencies(case)
    positions = torch.arange(_longest(case))[:, None]
    exact, rounded = (positions * f for f in (frequencies, frequencies.bfloat16().float()))
    return any(
        not torch.equal(turn(exact).bfloat16(), turn(rounded).bfloat16())
        for turn in (torch.cos, torch.sin)
    )


def surely_turns_by_rounded_angles(case: Case) -> bool:
    """The same over so many positions that some gradient is another."""
    return turns_by_rounded_angles(case) and _longest(case) >= LONG and programs.trains(case)


def exports_low_buffers(case: Case) -> bool:
    """Buffers of a model that is stored in bf16 are exported."""
    low = case.dtypes.storage == "bfloat16" and case.model.buffers
    return low and any(isinstance(action, Export) for action in case.program)


def surely_exports_low_buffers(case: Case) -> bool:
    """The same without an adapter, first of all, and all of it is taken."""
    first = case.program[0]
    whole = isinstance(first, Export) and first.drain == "full" and first.weights == "all"
    return whole and exports_low_buffers(case) and not case.model.lora_rank


def leaves_evaluation_unused(case: Case) -> bool:
    """FSDP1's shards are made by the first forward, or offload; evaluation was left before."""
    if case.engine.param_offload:
        return False
    used = False
    for action in case.program:
        if isinstance(action, Eval) and not used:
            return _names_a_size(case)
        used = (used or isinstance(action, BATCH_ACTIONS)) and not getattr(action, "fresh", False)
    return False


def surely_leaves_evaluation_unused(case: Case) -> bool:
    """The same, first of all."""
    return leaves_evaluation_unused(case) and isinstance(case.program[0], Eval)


def exports_frozen_units(case: Case) -> bool:
    """Adapters are units of their own: the base beside them is in wholly frozen ones, not cast."""
    uncast = case.dtypes.compute == case.dtypes.storage and case.mesh.shards == 1
    adapted = uncast and bool(case.model.lora_rank)
    return adapted and programs.exports_after_training(case, at_once=False)


def surely_exports_frozen_units(case: Case) -> bool:
    """The same right behind a batch, and all of the merged weights is taken."""
    at_once = exports_frozen_units(case) and programs.exports_after_training(case, at_once=True)
    apart = (action for action in case.program if isinstance(action, Export))
    return at_once and all(a.drain == "full" and a.weights == "merged" for a in apart)


def first_runs_without_adapter(case: Case) -> bool:
    """Nothing trains in the first forward, which is inference without the adapter."""
    if not case.dtypes.mixed or not programs.trains(case):
        return False
    first = True
    for action in case.program:
        if first and isinstance(action, Infer) and action.adapter == "off":
            return True
        first = (first and not isinstance(action, BATCH_ACTIONS)) or getattr(action, "fresh", False)
    return False


def surely_first_runs_without_adapter(case: Case) -> bool:
    """The same first of all, computed in another dtype than stored, and nothing is moved."""
    begins = isinstance(case.program[0], Infer) and case.dtypes.compute != case.dtypes.storage
    return begins and first_runs_without_adapter(case) and not case.engine.param_offload


def merges_few_rows(case: Case) -> bool:
    """An adapter is merged into a weight that has fewer rows than the mesh has shards."""
    return merges(case) and _fewest_rows(case) < case.mesh.shards


def surely_merges_few_rows(case: Case) -> bool:
    """The same in a unit, and something is taken of it."""
    return merges_few_rows(case) and _adapts_units(case) and takes_of_each(case)


def _interrupts_first_forward(case: Case) -> bool:
    first = case.program[0]
    return isinstance(first, Interrupt) and (first.phase, first.micro_batch) == ("forward", 0)


def _adapts_units(case: Case) -> bool:
    """The adapter is on layers of units alone."""
    return case.model.lora_targets in ("units", "named")


def _names_a_size(case: Case) -> bool:
    """The mesh is one that `fsdp_size` asks for."""
    return case.mesh.ndim == 2 and case.mesh.shards > 1


def _longest(case: Case) -> int:
    return max(s.length for batch in case.batches for s in batch.sequences)


@functools.lru_cache(maxsize=64)
def _rotary_frequencies(case: Case) -> Tensor:
    """Of one head, in float32: the same in every layer."""
    buffers = build_model(case).named_buffers()
    return next(value for name, value in buffers if name.endswith(".inv_freq"))


@functools.lru_cache(maxsize=64)
def _fewest_rows(case: Case) -> int:
    """Of the weights that have an adapter beside them."""
    parameters = build_model(case).named_parameters()
    rows = (value.shape[0] for name, value in parameters if ".base_layer." in name)
    return min(rows, default=case.mesh.shards)

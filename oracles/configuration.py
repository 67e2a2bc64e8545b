"""The configuration's contract as data: which values are illegal, and where each field must matter.

Field names are those of verl's FSDP engine and of its optimizer section, nested ones dotted. An
engine is held to the fields that its own defaults list.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from fsdp_engine.contract.actions import Action, Train
from fsdp_engine.contract.batch import Batch, Sequence
from fsdp_engine.contract.case import Case, EngineOptions, Mesh, Optimizer, Scalar, Strategy
from fsdp_engine.contract.model import Model
from oracles.verdict import Mismatch

Overrides = tuple[tuple[str, Scalar], ...]

SYNC = "use_no_sync_for_gradient_accumulation"
WRAPPED = "wrap_policy.transformer_layer_cls_to_wrap"
UNKNOWN = "no_such_field"

SHOWS_ON_DEVICE = ("param_offload", "optimizer_offload", "offload_policy")
"""Fields that say where something is: where the host is the device they change nothing."""

_STEPS: tuple[Action, ...] = (Train(step=True), Train(step=True), Train(step=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A pair of legal cases that differ in `field` (and in what must go with it).

    They must show something different, or the engine must refuse `changed`.
    """

    field: str
    base: Case
    changed: Case


@dataclass(frozen=True, slots=True, kw_only=True)
class Illegal:
    """A case whose overrides make `field` illegal: to be refused on all ranks, silently."""

    field: str
    case: Case


def probes() -> tuple[Probe, ...]:
    """For every field at least one pair of cases in which it must matter."""
    return tuple(
        Probe(field=field, base=base, changed=_with(base, overrides))
        for field, overrides, base in _PROBES
    )


def illegal_cases() -> tuple[Illegal, ...]:
    """Cases with one illegal value each; a name that is no field is among them."""
    return tuple(
        Illegal(field=field, case=_with(base, overrides)) for field, overrides, base in _ILLEGAL
    )


def base_of(case: Case) -> Case:
    """What a case with overrides is compared with: its probe's base, or the same without any."""
    for probe in probes():
        if probe.changed == case:
            return probe.base
    return _with(case, ())


def default_mismatches(defaults: dict[str, dict[str, Scalar]]) -> list[Mismatch]:
    """Every entry point against the first: the same fields with the same values and types."""
    (first, wanted), *others = defaults.items()
    return [
        Mismatch(
            where=f"default of {field} in {entry}",
            got=repr(got[field]) if field in got else "no such field",
            wanted=(repr(wanted[field]) if field in wanted else "no such field")
            + f" as in {first}",
        )
        for entry, got in others
        for field in dict.fromkeys((*wanted, *got))
        if field not in got or field not in wanted or repr(got[field]) != repr(wanted[field])
    ]


def unprobed(defaults: dict[str, dict[str, Scalar]]) -> list[str]:
    """Fields of any entry point that no probe is about."""
    probed = {field for field, _, _ in _PROBES}
    return sorted({field for fields in defaults.values() for field in fields} - probed)


def _with(case: Case, overrides: Overrides) -> Case:
    return dataclasses.replace(case, engine=dataclasses.replace(case.engine, overrides=overrides))


def _case(
    *,
    strategy: Strategy = "fsdp2",
    shape: tuple[int, ...] = (2,),
    model: Model | None = None,
    program: tuple[Action, ...] = (Train(),),
    optimizer: Optimizer | None = None,
    gated: tuple[bool, ...] = (True, True),
    overrides: Overrides = (),
) -> Case:
    """Two micro-batches of one sequence on every rank, no two sequences of a rank alike."""
    mesh = Mesh(shape=shape)
    ranks = tuple(
        tuple(
            Sequence(
                key=rank * len(gated) + place,
                length=2 + place,
                loss_tokens=1 + rank % 2,
                gated=uses_optional,
            )
            for place, uses_optional in enumerate(gated)
        )
        for rank in range(mesh.world_size)
    )
    return Case(
        mesh=mesh,
        model=model or Model(family="mlp", units=2),
        engine=EngineOptions(strategy=strategy, overrides=overrides),
        optimizer=optimizer or Optimizer(),
        batches=(Batch(ranks=ranks),),
        program=program,
    )


_FSDP1 = _case(strategy="fsdp1")
_FSDP2 = _case()
_TOKENS = _case(model=Model(family="embedding", units=2))
_FOUR_RANKS = _case(shape=(4,))
_FOUR_EACH = _case(gated=(True, True, True, True))
_STEPPED = _case(program=_STEPS)
_ADAMW = _case(optimizer=Optimizer(kind="adamw", clip_grad=64.0), program=_STEPS)
_SOMETIMES = Model(family="mlp", units=3, optional="unit")
_GATHERS = _case(model=_SOMETIMES, gated=(True, False))
_GATHERS_1 = _case(strategy="fsdp1", model=_SOMETIMES, gated=(True, False))
_ROTARY = _case(strategy="fsdp1", model=Model(family="llama", width=8))
_DYNAMIC: Overrides = (("use_dynamic_bsz", True),)
_PLANNED: Overrides = (*_DYNAMIC, ("max_token_len_per_gpu", 9))
_COSINE: Overrides = (("lr_scheduler_type", "cosine"),)
_COSINE_4: Overrides = (*_COSINE, ("total_training_steps", 4))
_CLIPPED: Overrides = (("clip_grad", 0.0009765625),)
_NO_WARMUP: Overrides = (("lr_warmup_steps", -1),)

_PROBES: tuple[tuple[str, Overrides, Case], ...] = (
    ("strategy", (("strategy", "fsdp"),), _FSDP2),
    ("fsdp_size", (("fsdp_size", 1),), _FSDP2),
    ("reshard_after_forward", (("reshard_after_forward", False),), _FSDP2),
    ("reshard_after_forward", (("reshard_after_forward", False),), _FSDP1),
    (SYNC, ((SYNC, True),), _FSDP2),
    (SYNC, ((SYNC, True),), _FSDP1),
    ("use_orig_params", (("use_orig_params", False),), _FSDP1),
    # Gathering ahead shows where a unit is gathered that then does not run.
    ("forward_prefetch", (("forward_prefetch", True),), _GATHERS),
    ("forward_prefetch", (("forward_prefetch", True),), _GATHERS_1),
    ("model_dtype", (("model_dtype", "bf16"),), _TOKENS),
    ("mixed_precision.param_dtype", (("mixed_precision.param_dtype", "bf16"),), _FSDP2),
    ("mixed_precision.param_dtype", (("mixed_precision.param_dtype", "bf16"),), _FSDP1),
    ("mixed_precision.reduce_dtype", (("mixed_precision.reduce_dtype", "bf16"),), _FSDP2),
    ("mixed_precision.reduce_dtype", (("mixed_precision.reduce_dtype", "bf16"),), _FSDP1),
    # Rotary frequencies are buffers that bf16 cannot hold.
    ("mixed_precision.buffer_dtype", (("mixed_precision.buffer_dtype", "bf16"),), _ROTARY),
    (WRAPPED, ((WRAPPED, "Linear"),), _FSDP2),
    ("wrap_policy.min_num_params", (("wrap_policy.min_num_params", 1),), _FSDP2),
    ("use_dynamic_bsz", (*_DYNAMIC, ("max_token_len_per_gpu", 64)), _FSDP2),
    (
        "max_token_len_per_gpu",
        (*_DYNAMIC, ("max_token_len_per_gpu", 32)),
        _with(_FSDP2, (*_DYNAMIC, ("max_token_len_per_gpu", 3))),
    ),
    # Tokens 2, 3, 4 and 5: planned one by one the first two are not together.
    ("force_group_size", (*_PLANNED, ("force_group_size", 2)), _with(_FOUR_EACH, _PLANNED)),
    ("micro_batch_size_per_gpu", (("micro_batch_size_per_gpu", 2),), _FSDP2),
    ("loss_agg_mode", (("loss_agg_mode", "token-sum"),), _FSDP2),
    ("forward_only", (("forward_only", True),), _FSDP2),
    ("param_offload", (("param_offload", True),), _FSDP2),
    ("param_offload", (("param_offload", True),), _FSDP1),
    ("optimizer_offload", (("optimizer_offload", True),), _ADAMW),
    ("offload_policy", (("offload_policy", True),), _FSDP2),
    ("optimizer", (("optimizer", "SGD"),), _ADAMW),
    ("lr", (("lr", 0.25),), _STEPPED),
    ("weight_decay", (("weight_decay", 0.5),), _STEPPED),
    # A first AdamW step is the sign of the gradient whatever the betas: there are three steps.
    ("betas.0", (("betas.0", 0.5),), _ADAMW),
    ("betas.1", (("betas.1", 0.5),), _ADAMW),
    ("clip_grad", _CLIPPED, _STEPPED),
    # Infinity is no clipping, where the base case clips.
    ("clip_grad", (("clip_grad", ".inf"),), _with(_STEPPED, _CLIPPED)),
    ("lr_scheduler_type", _COSINE_4, _STEPPED),
    ("lr_warmup_steps", (("lr_warmup_steps", 2),), _STEPPED),
    (
        "lr_warmup_steps_ratio",
        (*_NO_WARMUP, ("lr_warmup_steps_ratio", 0.5), ("total_training_steps", 4)),
        _with(_STEPPED, _NO_WARMUP),
    ),
    (
        "total_training_steps",
        (*_COSINE, ("total_training_steps", 8)),
        _with(_STEPPED, _COSINE_4),
    ),
    ("min_lr_ratio", (*_COSINE_4, ("min_lr_ratio", 0.5)), _with(_STEPPED, _COSINE_4)),
    ("num_cycles", (*_COSINE_4, ("num_cycles", 1.0)), _with(_STEPPED, _COSINE_4)),
)

_ILLEGAL: tuple[tuple[str, Overrides, Case], ...] = (
    ("strategy", (("strategy", "ddp"),), _FSDP2),
    ("fsdp_size", (("fsdp_size", 0),), _FSDP2),
    ("fsdp_size", (("fsdp_size", 3),), _FOUR_RANKS),
    ("fsdp_size", (("fsdp_size", "2"),), _FSDP2),
    ("reshard_after_forward", (("reshard_after_forward", 1),), _FSDP2),
    (SYNC, ((SYNC, "yes"),), _FSDP2),
    ("use_orig_params", (("use_orig_params", False),), _FSDP2),
    ("model_dtype", (("model_dtype", "int8"),), _FSDP2),
    ("model_dtype", (("model_dtype", None),), _FSDP2),
    ("mixed_precision.param_dtype", (("mixed_precision.param_dtype", "int8"),), _FSDP2),
    ("mixed_precision.reduce_dtype", (("mixed_precision.reduce_dtype", "half"),), _FSDP1),
    ("mixed_precision.buffer_dtype", (("mixed_precision.buffer_dtype", "bf16"),), _FSDP2),
    (WRAPPED, ((WRAPPED, "NoSuchLayer"),), _FSDP2),
    ("wrap_policy.min_num_params", (("wrap_policy.min_num_params", -1),), _FSDP2),
    ("use_dynamic_bsz", _DYNAMIC, _FSDP2),
    ("max_token_len_per_gpu", (("max_token_len_per_gpu", 64),), _FSDP2),
    ("max_token_len_per_gpu", (*_DYNAMIC, ("max_token_len_per_gpu", 0)), _FSDP2),
    ("micro_batch_size_per_gpu", (("micro_batch_size_per_gpu", 0),), _FSDP2),
    ("force_group_size", (*_PLANNED, ("force_group_size", 0)), _FSDP2),
    ("force_group_size", (("force_group_size", 2),), _FSDP2),
    ("loss_agg_mode", (("loss_agg_mode", "mean"),), _FSDP2),
    ("param_offload", (("param_offload", 1),), _FSDP2),
    ("param_offload", (("param_offload", True), ("offload_policy", True)), _FSDP2),
    ("optimizer_offload", (("optimizer_offload", True), ("forward_only", True)), _FSDP2),
    ("optimizer_offload", (("optimizer_offload", True), ("offload_policy", True)), _FSDP2),
    ("offload_policy", (("offload_policy", True),), _FSDP1),
    ("optimizer", (("optimizer", "NoSuchOptimizer"),), _FSDP2),
    ("lr", (("lr", -1.0),), _FSDP2),
    ("lr", (("lr", ".nan"),), _FSDP2),
    ("lr", (("lr", ".inf"),), _FSDP2),
    ("weight_decay", (("weight_decay", -1.0),), _FSDP2),
    ("weight_decay", (("weight_decay", ".nan"),), _FSDP2),
    ("betas.0", (("betas.0", 1.0),), _ADAMW),
    ("betas.0", (("betas.0", ".nan"),), _ADAMW),
    ("betas.1", (("betas.1", 1.0),), _ADAMW),
    ("betas.1", (("betas.1", -0.5),), _ADAMW),
    ("betas.0", (("betas", 0.9),), _ADAMW),
    ("clip_grad", (("clip_grad", None),), _FSDP2),
    ("clip_grad", (("clip_grad", 0.0),), _FSDP1),
    ("clip_grad", (("clip_grad", -1.0),), _FSDP2),
    ("clip_grad", (("clip_grad", ".nan"),), _FSDP1),
    ("clip_grad", (("clip_grad", "-.inf"),), _FSDP2),
    ("clip_grad", (("clip_grad", "1.0"),), _FSDP2),
    ("clip_grad", (("clip_grad", True),), _FSDP2),
    ("lr_scheduler_type", (("lr_scheduler_type", "linear"),), _FSDP2),
    ("total_training_steps", _COSINE, _FSDP2),
    ("lr_warmup_steps_ratio", (*_NO_WARMUP, ("lr_warmup_steps_ratio", 2.0)), _FSDP2),
    ("min_lr_ratio", (("min_lr_ratio", 0.5),), _FSDP2),
    ("min_lr_ratio", (*_COSINE_4, ("min_lr_ratio", 1.5)), _FSDP2),
    ("num_cycles", (("num_cycles", 1.0),), _FSDP2),
    (UNKNOWN, ((UNKNOWN, True),), _FSDP2),
    (UNKNOWN, (("mixed_precision.no_such_field", "bf16"),), _FSDP2),
)

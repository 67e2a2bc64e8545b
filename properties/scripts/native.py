"""Scripts that show a wrong gradient, an exception or a hang with torch and the engine alone.

Such a script trains one batch on real ranks and holds every element of the gradient against the
same micro-batches run one after the other in one process, within the bound of what the reduction
rounds. It has the case's shapes and settings, and simpler numbers of its own; so it says something
only once it was run (see `properties.proof`). There is one for plain torch and one for the
reference engine, planted faults included; `native_script` gives None where there are no words.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, replace
from string import Template

from fsdp_engine.contract.actions import Train
from fsdp_engine.contract.batch import Static
from fsdp_engine.contract.case import Case
from fsdp_engine.contract.observation import Numerics
from oracles.rounding import allowance, local_dtype
from properties.repro import PROJECT
from properties.scripts import templates
from properties.scripts.model import data_source, model_source, wide

MAX_LINES = 80
DEADLINE_S = {True: 20, False: 60}
"""How long the ranks of a script may take, by whether it shows a hang; most need a second."""

TORCH_ENGINES = ("torch_fsdp1", "torch_fsdp2")
"""Engines whose scripts are torch alone."""

_CONTROLLED = 'if "control" in sys.argv[1:]:'


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A case of one batch, and the precision that its engine declares for it.

    Without that nothing is compared: it is enough that a run ends.
    """

    case: Case
    numerics: Numerics | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What a script is to show.

    `family` is the name the engine gives itself, `how` the way the case ended (see `Ending`),
    `seen` what is wrong. `control` passes; `difference` says in words where it differs.
    """

    setting: Setting
    property_id: str
    engine: str
    family: str
    how: str
    seen: str
    versions: str
    control: Setting | None = None
    difference: str = ""


def native_script(shown: Shown, *, name: str) -> str | None:
    """The text of the script, `name` its file; None where the case is beyond it."""
    case = shown.setting.case
    died = shown.how in {"Died", "WorldFailed", "Flaked", "NotRun", "Fixed"}
    if shown.family not in ("reference", *TORCH_ENGINES) or beyond(case) or died:
        return None
    control = shown.control
    assert control is None or same_words(case, control.case)
    raised = shown.how.removeprefix("Raised") if shown.how.startswith("Raised") else ""
    told = f"control: the nearest case that passes: {shown.difference}"
    seen = textwrap.shorten(
        shown.seen.replace("\\", "/").replace('"', "'"), 160, placeholder=" ..."
    )
    inputs = 'batch.inputs["input"]' + ("" if case.model.takes_tokens else ".to(COMPUTE)")
    judged = shown.setting.numerics is not None
    names = _names(shown.setting)
    changed = {k: v for k, v in _names(control).items() if names[k] != v} if control else {}
    text = Template(templates.SCRIPT).substitute(
        title=f"{shown.property_id} does not hold: {shown.engine}, {_told(case)}",
        run=f"torchrun --standalone --nproc-per-node={case.mesh.world_size} {name}",
        name=name,
        told=told if control else "control: none",
        versions=shown.versions,
        seen=seen,
        imports="\n".join(_imports(case, shown)),
        names=_assigned(names),
        control=f"\n{_CONTROLLED}\n    {_assigned(changed, indent=4)}" if control else "",
        model=model_source(case),
        data=data_source(case),
        local=Template(templates.LOCAL).substitute(inputs=inputs) if judged else "",
        share=templates.SHARES[case.engine.loss_mode],
        engine=_engine(case, shown),
        hang=1 if shown.how == "Hung" else 2,
        error=f'1 if type(error).__name__ == "{raised}" else 2' if raised else "2",
        compare=_compare(names, changed) if judged else "gradients(rank)",
        fixed="every gradient is the mean of the ranks' own, within rounding"
        if judged
        else "the batch ran to its end",
        deadline=DEADLINE_S[shown.how == "Hung"],
    )
    if len(text.splitlines()) <= MAX_LINES:
        return text
    return native_script(replace(shown, control=None), name=name) if control else None


def has_control(text: str) -> bool:
    """Whether a script has one."""
    return _CONTROLLED in text


def beyond(case: Case) -> str:
    """What of a case the scripts have no words for; empty where there is nothing."""
    engine, model = case.engine, case.model
    plain = engine.config_source == "dataclass" and not engine.overrides
    found = {
        "more than one batch": len(case.program) > 1 or not isinstance(case.program[0], Train),
        "micro-batches of several sequences": engine.planning != Static(),
        "a configuration from elsewhere": not plain,
        f"a {model.family} model": model.is_language,
        "an optional part": model.optional != "none",
        "buffers": model.buffers,
        "frozen biases": model.frozen == "biases",
        "an adapter outside the units": model.lora_targets != "units",
        "a schedule of a device": case.schedule is not None,
    }
    return ", ".join(name for name, there in found.items() if there)


def same_words(case: Case, control: Case) -> bool:
    """Whether two cases differ in what a script names as settings, and in nothing else."""
    one, other = case.engine, control.engine
    return not beyond(control) and (
        (case.model, case.exact) == (control.model, control.exact)
        and (one.loss_mode, one.strategy) == (other.loss_mode, other.strategy)
        and wide(case) == wide(control)
    )


def _told(case: Case) -> str:
    return f"{case.engine.strategy} on mesh {case.mesh.shape}"


def _imports(case: Case, shown: Shown) -> list[str]:
    adapter = "; import peft" if case.model.lora_rank else ""
    lines = [
        "import torch, torch.distributed as dist; torch.set_num_threads(1)",
        f"from torch import nn{adapter}",
    ]
    if shown.family != "reference":
        return [*lines, "from torch.distributed import fsdp, init_device_mesh"]
    lines.insert(0, f"sys.path[:0] = [{str(PROJECT)!r}, os.getcwd()]")
    lines.append("from fsdp_engine.adapters import reference  # the engine")
    if ":" in shown.engine:
        module, _, name = shown.engine.partition(":")
        lines.append(f"from {module} import {name} as Faulty")
    return lines


def _names(setting: Setting) -> dict[str, str]:
    """A case's settings as names and values of source.

    `RELATIVE` and `ABSOLUTE` are the bound of its reduction.
    """
    case, numerics = setting.case, setting.numerics
    engine, dtypes = case.engine, case.dtypes
    (action,) = case.program
    assert isinstance(action, Train)
    ranks = [
        [(s.key, s.length, s.loss_tokens) for s in rank]
        for rank in case.batches[action.batch].ranks
    ]
    judged = {}
    if numerics is not None:
        allowed = allowance(numerics, len(ranks[0]))
        judged = {
            "COMPUTE": f"torch.{dtypes.compute}",
            "KEPT": f"torch.{local_dtype(numerics)}",
            "RELATIVE": repr(allowed.relative + 2.0**-50),  # the sums of a script are in double
            "ABSOLUTE": repr(allowed.absolute),
        }
    mixed = {"param_dtype": dtypes.compute, "reduce_dtype": dtypes.reduce} if dtypes.mixed else {}
    return {
        "MESH": repr(case.mesh.shape),
        "RESHARD": repr(engine.reshard_after_forward),
        "DEFERRED": repr(engine.deferred),
        "STORAGE": f"torch.{dtypes.storage}",
        "MIXED": repr(mixed),
        **judged,
        "RANKS": repr(ranks),
    }


def _compare(names: dict[str, str], changed: dict[str, str]) -> str:
    """How gradients are held against what each rank reduces: one sum, or one of a micro-batch."""
    sums = "[part(sum(g[name] for g in held)).double() for held in grads]"
    each = "[part(g[name]).double() for held in grads for g in held]"
    terms = sums if names["DEFERRED"] == "True" else each
    if "DEFERRED" in changed:
        terms = f"{sums} if DEFERRED else {each}"
    return Template(templates.COMPARE.rstrip()).substitute(terms=terms)


def _assigned(names: dict[str, str], *, indent: int = 0) -> str:
    """Assignments, several to a line."""
    lines: list[str] = []
    for name, value in names.items():
        text = f"{name} = {value}"
        if lines and name != "RANKS" and len(lines[-1]) + len(text) < 110:
            lines[-1] += f"; {text}"
        else:
            lines.append(text)
    return ("\n" + " " * indent).join(lines)


def _engine(case: Case, shown: Shown) -> str:
    """`gradients(rank)`: name, this rank's part, how to take that part of a full tensor."""
    if shown.family != "reference":
        return {"torch_fsdp1": templates.FSDP1, "torch_fsdp2": templates.FSDP2}[shown.family]
    mode = case.engine.loss_mode
    fsdp1 = case.engine.strategy == "fsdp1"
    plant = f'    Faulty().plant_faults(Data(engine=Data(loss_mode="{mode}")))\n'
    return Template(templates.REFERENCE).substitute(
        plant=plant if ":" in shown.engine else "",
        strategy="fsdp" if fsdp1 else "fsdp2",
        part=templates.FLAT_PART if fsdp1 else templates.DIM_PART,
        mode=mode,
    )

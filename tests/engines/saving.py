"""Engines that write a folder for `transformers` where they are asked to infer, and load it."""

from __future__ import annotations

import tempfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_engine.adapters.reference import Reference
from fsdp_engine.contract.actions import Export
from fsdp_engine.contract.case import Case
from fsdp_engine.contract.protocol import RankContext, TokenLoss
from fsdp_engine.engine.engine import FsdpEngine
from fsdp_engine.engine.pretrained import write_safetensors
from fsdp_engine.workload.batches import LocalBatch


class Saves(Reference):
    """Logits of what rank 0 loads are those of the engine, bit for bit; else it raises."""

    kind: ClassVar[Literal["all", "base", "merged"]] = "all"
    unfuse: ClassVar[bool] = False

    def build(self, case: Case, rank: RankContext) -> FsdpEngine:
        engine = super().build(case, rank)

        def infer(batch: LocalBatch, loss: TokenLoss) -> Tensor:
            with tempfile.TemporaryDirectory() as folder:
                shared = [folder]
                dist.broadcast_object_list(shared)
                self._save_and_load(engine, case, batch, Path(shared[0]))
            return FsdpEngine.infer(engine, batch, loss)

        engine.infer = infer  # type: ignore[method-assign]
        return engine

    def _save_and_load(
        self, engine: FsdpEngine, case: Case, batch: LocalBatch, folder: Path
    ) -> None:
        write_safetensors(engine.weights, folder, kind=self.kind, unfuse=self.unfuse)
        assert sorted(path.name for path in folder.iterdir()) == [
            "config.json",
            "model.safetensors",
        ]
        exported = dict(engine.export(Export(weights=self.kind)))
        inputs = batch.select(range(len(batch))).inputs
        inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        own: Tensor | None = None
        if self.kind != "merged" or case.model.can_merge_in_place:
            with self._as_saved(engine), torch.no_grad():
                own = engine.module(**inputs).logits
        if dist.get_rank() == 0:
            loaded = _load(case, folder)
            for name, tensor in loaded.state_dict().items():
                assert torch.equal(tensor, exported.pop(name)), name
            assert not exported
            with torch.no_grad():
                logits = loaded(**inputs).logits
            assert own is None or torch.equal(logits, own)
        dist.barrier()

    def _as_saved(self, engine: FsdpEngine) -> AbstractContextManager[None]:
        match self.kind:
            case "base":
                return engine.disable_adapter()
            case "merged":
                return engine.merge_adapter()
            case _:
                return nullcontext()


class SavesUnfused(Saves):
    """Experts one by one."""

    unfuse = True


class SavesBase(Saves):
    """The model that the adapter was put on."""

    kind = "base"


class SavesMerged(Saves):
    """The adapter added to it."""

    kind = "merged"


class SavesMergedUnfused(SavesMerged):
    """Both."""

    unfuse = True


def _load(case: Case, folder: Path) -> nn.Module:
    import transformers

    options: dict[str, Any] = {"local_files_only": True, "attn_implementation": "eager"}
    if case.model.family == "mixtral":
        options["experts_implementation"] = "eager"
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    loaded, report = load(folder, output_loading_info=True, **options)
    assert not any(report.values()), report
    assert isinstance(loaded, nn.Module)
    return loaded.eval()

"""One forward and backward of a case's model in this process, under a chosen arithmetic.

The machinery that truth and replay share: load weights in a dtype, run, hand back the gradients.
What is run over which sequences, and how the loss is normalised, is each side's own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fsdp_engine.contract.case import Case, Dtype
from fsdp_engine.contract.observation import Numerics
from fsdp_engine.workload.batches import MicroBatch
from fsdp_engine.workload.losses import token_loss
from fsdp_engine.workload.models import TORCH_DTYPES, build_model, module_arguments, unit_names

HOST = torch.device("cpu")

_BALLAST = 3 * 512
"""Bytes that are held meanwhile, so that activations are not where they were."""

_ALIGNMENT = 16
"""Bytes that a flat parameter's parts are aligned to; memory of its own has 512 on a GPU."""

Weights: TypeAlias = Mapping[str, Tensor]
Total: TypeAlias = Callable[[Tensor, MicroBatch], Tensor]
"""`([sequences, tokens] losses, micro-batch) -> scalar` to differentiate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """How to evaluate: dtype of parameters, of floating buffers (None: left alone), input casts.

    `throughout`: also what the model itself casts to float32 is float64. `autocast`: the dtype of
    an autocast around forward and loss. `device`: where, None for the host; what comes back is on
    the host. `elsewhere`: with the same values at other addresses.
    """

    compute: Dtype
    buffers: Dtype | None
    input_cast: bool
    throughout: bool = False
    autocast: Dtype | None = None
    device: str | None = None
    elsewhere: bool = False

    @staticmethod
    def of(numerics: Numerics) -> Arithmetic:
        """What an engine declares for its forward and backward."""
        return Arithmetic(
            compute=numerics.compute,
            buffers=numerics.buffers,
            input_cast=numerics.input_cast,
            autocast=numerics.autocast,
            device=numerics.device,
        )


FLOAT64 = Arithmetic(compute="float64", buffers="float64", input_cast=True, throughout=True)
"""Double from the inputs to the gradients, whatever the model casts to."""

FLOAT32 = Arithmetic(compute="float32", buffers="float32", input_cast=True)
"""Single, as an estimate of how strongly the model amplifies rounding errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The scalar that was differentiated, and the gradients; a missing name had none."""

    total: float
    gradients: dict[str, Tensor]


class Float64Mode(TorchFunctionMode):
    """Maps float32 to float64 in every torch call, `.float()` included."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        # This is called for every operation, and next to none of them names a dtype.
        if any(value is torch.float32 for value in args):
            args = tuple(map(_widened, args))
        if not kwargs:
            return func(*args)
        return func(*args, **{name: _widened(value) for name, value in kwargs.items()})


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def _placed(weights: Weights, dtype: torch.dtype, place: torch.device) -> dict[str, Tensor]:
    """Copies, each in memory of its own."""
    return {name: weight.detach().to(place, dtype, copy=True) for name, weight in weights.items()}


def _packed(weights: Weights, dtype: torch.dtype, place: torch.device) -> dict[str, Tensor]:
    """Copies in one piece of memory, in reverse order: each at another address and alignment."""
    step = _ALIGNMENT // dtype.itemsize
    starts, end = {}, step
    for name in reversed([*weights]):
        starts[name] = end
        end += -(-weights[name].numel() // step) * step
    flat = torch.zeros(end, dtype=dtype, device=place)
    packed = {}
    for name, weight in weights.items():
        view = flat[starts[name] : starts[name] + weight.numel()].view(weight.shape)
        packed[name] = view.copy_(weight.detach())
    return packed


class Evaluator:
    """A case's model, built once; every call starts from the weights it is given."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._loss = token_loss(case)
        self._module = build_model(case).train()
        self._parameters = dict(self._module.named_parameters())
        self._buffers = dict(self._module.named_buffers())
        self._kept_buffers = {name: buffer.clone() for name, buffer in self._buffers.items()}
        self.weights: dict[str, Tensor] = {
            name: parameter.detach().clone() for name, parameter in self._parameters.items()
        }
        self._cast_to: torch.dtype | None = None
        self._autocast: Dtype | None = None
        self._place = HOST
        self._ballast: Tensor | None = None
        units = [self._module.get_submodule(name) for name in unit_names(case)]
        for unit in (self._module, *units):
            unit.register_forward_pre_hook(self._cast_inputs, with_kwargs=True)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Full shape of every parameter, frozen ones included, in the model's order."""
        return {name: tuple(weight.shape) for name, weight in self.weights.items()}

    @property
    def trainable(self) -> frozenset[str]:
        """Names of the parameters that take gradients."""
        return frozenset(name for name, p in self._parameters.items() if p.requires_grad)

    def freeze(self, names: Collection[str]) -> None:
        """From now on exactly these parameters take no gradients."""
        for name, parameter in self._parameters.items():
            parameter.requires_grad_(name not in names)

    def keep_buffers(self, tensors: Mapping[str, Tensor]) -> None:
        """From now on buffers have these values; those without one stay as they were built."""
        for name in self._kept_buffers.keys() & tensors.keys():
            self._kept_buffers[name] = tensors[name].detach().clone()

    @contextmanager
    def loaded(self, weights: Weights, arithmetic: Arithmetic) -> Iterator[None]:
        """Evaluate inside with these weights, in storage dtype, under this arithmetic."""
        compute = TORCH_DTYPES[arithmetic.compute]
        self._place = HOST if arithmetic.device is None else torch.device(arithmetic.device)
        placing = _packed if arithmetic.elsewhere else _placed
        if arithmetic.elsewhere:
            self._ballast = torch.empty(_BALLAST, dtype=torch.uint8, device=self._place)
        own = {name: weights[name] for name in self._parameters}
        for name, value in placing(own, compute, self._place).items():
            self._parameters[name].data = value
        for name, buffer in self._buffers.items():
            kept = self._kept_buffers[name].to(self._place, copy=True)
            casts = arithmetic.buffers is not None and kept.is_floating_point()
            buffer.data = kept.to(TORCH_DTYPES[arithmetic.buffers]) if casts else kept  # type: ignore[index]  # casts implies a name
        self._cast_to = compute if arithmetic.input_cast else None
        self._autocast = arithmetic.autocast
        num_threads, default_dtype = torch.get_num_threads(), torch.get_default_dtype()
        torch.set_num_threads(1)  # ranks have one thread; the order of sums depends on it
        if arithmetic.throughout:
            torch.set_default_dtype(torch.float64)
        try:
            with Float64Mode() if arithmetic.throughout else nullcontext():
                yield
        finally:
            torch.set_default_dtype(default_dtype)
            torch.set_num_threads(num_threads)
            self._cast_to = self._autocast = self._ballast = None
            self._place = HOST
            self._drop_gradients()

    def evaluate(self, micro_batch: MicroBatch, total: Total) -> Evaluation:
        """Forward and backward over one micro-batch, inside `loaded`."""
        self._drop_gradients()
        micro_batch = self._moved(micro_batch)
        with self._autocasting():
            output = self._module(**module_arguments(self.case, micro_batch.inputs))
            scalar = total(self._loss(output, micro_batch), micro_batch)
        scalar.backward()  # type: ignore[no-untyped-call]  # torch's own
        gradients = {
            name: parameter.grad.to(HOST)
            for name, parameter in self._parameters.items()
            if parameter.grad is not None
        }
        return Evaluation(total=float(scalar.detach()), gradients=gradients)

    def losses(self, micro_batch: MicroBatch, *, training: bool) -> Tensor:
        """Per-token losses `[sequences, tokens]` of one forward, inside `loaded`.

        In train mode, or in eval mode and without gradients as inference runs.
        """
        self._module.train(training)
        micro_batch = self._moved(micro_batch)
        try:
            with torch.set_grad_enabled(training), self._autocasting():
                output = self._module(**module_arguments(self.case, micro_batch.inputs))
                return self._loss(output, micro_batch).detach().to(HOST)
        finally:
            self._module.train()

    def _autocasting(self) -> AbstractContextManager[Any]:
        if self._autocast is None:
            return nullcontext()
        return torch.autocast(self._place.type, dtype=TORCH_DTYPES[self._autocast])

    def _moved(self, micro_batch: MicroBatch) -> MicroBatch:
        return micro_batch if self._place == HOST else micro_batch.to(self._place)

    def _drop_gradients(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def _cast_inputs(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What a wrapped unit does to its floating inputs before it runs."""
        if self._cast_to is None:
            return args, kwargs
        return (
            tuple(self._cast_tree(value) for value in args),
            {name: self._cast_tree(value) for name, value in kwargs.items()},
        )

    def _cast_tree(self, value: Any) -> Any:
        """An argument cast; walking a tree costs more than a small layer, and most are none."""
        plain = value is None or isinstance(value, (Tensor, bool, int, float, str))
        return self._cast(value) if plain else pytree.tree_map(self._cast, value)

    def _cast(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.to(self._cast_to)
        return value

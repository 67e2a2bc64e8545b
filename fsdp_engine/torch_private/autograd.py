"""Hooks into the autograd engine and the dispatcher. Checked on torch 2.13."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

Kernel: TypeAlias = Callable[[Callable[[], Any], dict[str, Any]], Any]


def in_backward() -> bool:
    """Whether the calling thread is inside a backward pass, its final callbacks included."""
    return bool(torch._C._current_graph_task_id() != -1)


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call back after the final callbacks that are queued by the end of this backward pass."""
    queue: Any = torch.autograd.Variable._execution_engine.queue_callback
    queue(lambda: queue(callback))


def hook_gradient(tensor: torch.Tensor, callback: Callable[[], None]) -> None:
    """Call back when a backward pass has the gradient of `tensor`, which stays as it is."""
    register: Any = tensor.register_hook
    register(lambda _: callback())


def intercept(kernels: Mapping[str, Kernel]) -> object:
    """Route every call of `c10d::name` through `kernel(call, arguments by name)`.

    The kernels sit at the key BackendSelect, which every call passes (inference mode and calls
    from C++ included) and no other operator pays for; `call()` goes on to the backend. They stay
    as long as the object returned does.
    """
    library: Any = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    for name, kernel in kernels.items():
        library.impl(name, _intercepted(name, kernel), "BackendSelect", with_keyset=True)
    return library


def _intercepted(name: str, kernel: Kernel) -> Callable[..., Any]:
    operator: Any = getattr(torch.ops.c10d, name).default
    names = [argument.name for argument in operator._schema.arguments]
    below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

    def intercepted(keyset: Any, *arguments: Any) -> Any:
        def call() -> Any:
            return operator.redispatch(keyset & below, *arguments)

        return kernel(call, dict(zip(names, arguments, strict=False)))

    return intercepted


def differentiable(output: Any) -> Iterator[Tensor]:
    """The tensors with a gradient in what a module returned, in order."""
    if isinstance(output, Tensor):
        if output.requires_grad:
            yield output
    elif isinstance(output, dict):
        yield from differentiable(tuple(output.values()))
    elif isinstance(output, (list, tuple)):
        for item in output:
            yield from differentiable(item)

"""``__torch_function__``, modes, transforms of functions and tracers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

NO_TORCH_FUNCTION = torch._C._disabled_torch_function_impl
"""``__torch_function__`` of a subclass of Tensor that functions treat as a plain tensor."""
FOREACH_ZERO = torch._foreach_zero_
"""Zeroes a list of tensors; optimizers call it."""
DATA_MAY_BE_SET: tuple[Any, ...] = (torch._has_compatible_shallow_copy_type,)
"""Functions that ``module.to()`` asks before it sets ``.data`` of a converted gradient."""


def without_overrides() -> AbstractContextManager[Any]:
    """Let functions treat tensors of all classes as plain tensors: no ``__torch_function__`` is asked."""
    return torch._C.DisableTorchFunctionSubclass()


def is_observed() -> bool:
    """Return True if modes, transforms of functions or a tracer see the operations that this thread runs."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or _len_torch_dispatch_stack_pre_dispatch() > 0
    )


@contextmanager
def unobserved() -> Iterator[None]:
    """Run operations that no mode, no transform of functions and no tracer of the caller sees or changes."""
    tracing = torch._C._get_tracing_state()
    modes = []
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        while torch._C._len_torch_function_stack():
            modes.append(torch._C._pop_torch_function_stack())
        with temporarily_clear_interpreter_stack(), _disable_current_modes():
            yield
    finally:
        while modes:
            torch._C._push_on_torch_function_stack(modes.pop())
        torch._C._set_tracing_state(tracing)  # type: ignore[attr-defined]


def before_transforms(wait: Callable[[list[Tensor], bool], object]) -> None:
    """Call ``wait([tensor], True)`` before ``torch.func``'s transforms wrap one: they ask no ``__torch_function__``."""
    from torch._functorch import eager_transforms, vmap

    for module, name in ((eager_transforms, "_wrap_for_grad"), (vmap, "_add_batch_dim")):
        wrap = getattr(module, name)
        if not hasattr(wrap, "_waits"):

            def wait_and_wrap(tensor: Tensor, *args: Any, wrap: Callable[..., Tensor] = wrap) -> Tensor:
                wait([tensor], True)
                return wrap(tensor, *args)

            wait_and_wrap._waits = True  # type: ignore[attr-defined]
            setattr(module, name, wait_and_wrap)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested containers; custom ones are registered with ``torch.utils._pytree``."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy every source into its target, in one call of ``torch._foreach_copy_``."""
    torch._foreach_copy_(list(targets), list(sources))


def version_of(tensor: Tensor) -> int:
    """Return the count of changes in place of a tensor's values."""
    return tensor._version

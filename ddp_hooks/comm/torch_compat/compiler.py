"""``torch.compile`` and TorchScript."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from ddp_hooks.comm.torch_compat import RemovableHandle, frames_of


def inside_compiled_region() -> bool:
    """Return True if something that ``torch.compile`` returned has called what runs, at any depth."""
    calls = frames_of("torch._dynamo.eval_frame", "compile_wrapper", "_fn")
    return any(type(frame.f_locals.get("self")).__name__ != "DisableContext" for frame in calls)


def let_graphs_know_of_hooks() -> None:
    """Make ``torch.compile`` guard on module hooks; clears its cache.

    By default a graph that was made of a module without hooks is used for modules with hooks, too: for the same module
    after hooks were registered, and for others of its class.
    """
    config = torch._dynamo.config
    if config.skip_nnmodule_hook_guards:
        config.skip_nnmodule_hook_guards = False
        torch._dynamo.reset()


def compiler_looks() -> bool:
    """Return True if the compiler asks, which describes everything that it meets, also gradients."""
    return torch._guards.TracingContext.try_get() is not None


def is_compiled(module: torch.nn.Module) -> bool:
    """Return True if calling the module runs graphs, as far as the module itself shows it."""
    if module.__dict__.get("_compiled_call_impl") is not None:
        return True
    compiler = sys.modules.get("torch._dynamo")
    if compiler is not None and isinstance(module, compiler.OptimizedModule):
        return True
    return hasattr(module.__dict__.get("forward"), "_torchdynamo_orig_callable")


def before_call(module: torch.nn.Module, hook: Callable[..., None]) -> RemovableHandle:
    """Call ``hook(module, args)`` before the module's code begins, outside of any graph; returns a handle."""
    # The method of nn.Module: scripted modules refuse hooks, but Python calls them through nn.Module's __call__.
    handle = torch.nn.Module.register_forward_pre_hook(module, hook, prepend=True)
    compiled = module.__dict__.get("_compiled_call_impl")  # contains the module's hooks
    if compiled is None:
        return RemovableHandle(handle.remove)

    def wait_and_call(*args: Any, **kwargs: Any) -> Any:
        hook(module, args)
        return compiled(*args, **kwargs)

    module._compiled_call_impl = wait_and_call

    def remove() -> None:
        handle.remove()
        if module.__dict__.get("_compiled_call_impl") is wait_and_call:
            module._compiled_call_impl = compiled

    return RemovableHandle(remove)


def has_hooks(module: torch.nn.Module) -> bool:
    """Return True if calling the module runs hooks of it, in forward or backward."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name) for name in names)

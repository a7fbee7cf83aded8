"""Modules that wait for parameters: those that own some, and those that are compiled or scripted.

A compiled or scripted module reads parameters where Python does not see it. It waits for all parameters below it before
its code begins, and so before the compiler's guards look at their classes. On accelerators the host waits, because
classes stay changed while any stream has to wait. Graphs then contain no wait and see parameters of one class only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ddp_hooks.comm.torch_compat.compiler import before_call, is_compiled, is_scripted
from ddp_hooks.intercept.module_hooks import InertInCopies


class WaitBefore(InertInCopies):
    """Forward pre-hook that calls ``wait`` with the numbers of parameters."""

    __slots__ = ("_parameters", "_wait")

    def __init__(self, wait: Callable[[Sequence[int]], None], parameters: Sequence[int]) -> None:
        self._wait = wait
        self._parameters = parameters

    def __call__(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():  # whoever entered the compiled code has waited
            self._wait(self._parameters)


class Entrances:
    """Forward pre-hooks on the modules that own parameters, and on those that are compiled or scripted."""

    def __init__(self, root: nn.Module, index_of: dict[int, int], wait: Callable[..., None]) -> None:
        self._root = root
        self._index_of = index_of  # id of a parameter -> its number
        self._wait = wait  # with on_host=True until parameters have their own classes
        self._handles: dict[nn.Module, Any] = {}  # modules that wait for their own parameters
        self._entrances: dict[nn.Module, Any] = {}  # modules that wait for all parameters below them
        for module in root.modules():
            own = self._numbers(module, recurse=False)
            if own and not is_scripted(module):
                self._handles[module] = module.register_forward_pre_hook(WaitBefore(wait, own), prepend=True)
        self.find()

    def find(self) -> bool:
        """Find modules that were compiled since the last call; return True if there are some."""
        known = len(self._entrances)
        for module in self._root.modules():
            if module not in self._entrances and (is_compiled(module) or is_scripted(module)):
                below = self._numbers(module, recurse=True)
                wait = partial(self._wait, on_host=True)
                self._entrances[module] = before_call(module, WaitBefore(wait, below))
        return len(self._entrances) > known

    def close(self) -> None:
        for handle in (*self._handles.values(), *self._entrances.values()):
            handle.remove()

    def _numbers(self, module: nn.Module, recurse: bool) -> tuple[int, ...]:
        parameters = module.parameters(recurse=recurse)
        return tuple(self._index_of[id(p)] for p in parameters if id(p) in self._index_of)

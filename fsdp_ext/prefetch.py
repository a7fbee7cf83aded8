"""Parameters to gather ahead: of the modules that ran next in the first forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ddp_hooks.comm.torch_compat.autograd import current_backward, inside_another_backward, queue_engine_callback
from fsdp_ext import compat

_DEFAULT_DEPTH = 2


class Prefetcher:
    """Learns the order of modules from the first forward's gathers, then lets FSDP2 gather ahead in that order.

    Forwards gather ahead only while the root's runs. When it ends, and when a backward ends, unused gathers are
    dropped: before parameters can change, and at a moment that all ranks share.
    """

    def __init__(self, root: nn.Module, depth: int | None) -> None:
        self._depth = depth  # modules to gather ahead; 0: none; None: 2, or all if they stay whole anyway
        self._root = root
        self._order: list[FSDPModule] = []  # in which parameters were gathered first
        self._num_forwards = 0
        self._following: dict[FSDPModule, list[FSDPModule]] = {}  # modules to gather ahead when one runs forward
        self._listed_forward: list[FSDPModule] = []  # modules that have these lists now
        self._listed_backward: dict[FSDPModule, list[FSDPModule]] = {}  # lists for backwards that are ours
        self.in_forward = False
        """True while the root's forward runs."""
        # Gathered in the root's forward or in a backward, and not waited for so far; in the order of all ranks.
        self._unused: dict[FSDPModule, None] = {}
        self._backward: int | None = None  # at its end these are dropped
        self._handles = [
            root.register_forward_pre_hook(torch.compiler.disable(self._begin_forward), prepend=True),
            root.register_forward_hook(torch.compiler.disable(self._end_forward), always_call=True),
        ]

    def on_gather(self, module: FSDPModule) -> None:
        backward = current_backward()
        if backward not in (-1, self._backward) and not inside_another_backward():
            self._backward = backward
            # After FSDP2's own end of the backward, which drops what is left of one root's gathers.
            queue_engine_callback(lambda: queue_engine_callback(self._drop_unused))
        if self.in_forward or backward != -1:
            self._unused[module] = None
        if self._num_forwards == 1 and module not in self._order:
            self._order.append(module)

    def on_wait(self, module: FSDPModule) -> None:
        self._unused.pop(module, None)

    def remove(self) -> None:
        self.in_forward = False
        for handle in self._handles:
            handle.remove()
        self._clear_forward_lists()
        for module, listed in self._listed_backward.items():
            _, present = compat.prefetch_lists(module)
            if present == list(map(compat.state_of, listed)):  # the user may have set another one
                module.set_modules_to_backward_prefetch([])
        self._unused |= dict.fromkeys(module for module in self._root.modules() if isinstance(module, FSDPModule))
        self._drop_unused()

    def _begin_forward(self, *ignored: Any) -> None:
        if current_backward() != -1:  # a checkpoint's
            return
        self.in_forward = False  # also if an interrupt has ended the last one
        self._drop_unused()  # a backward that failed may have left something
        self.in_forward = True
        if self._order or not self._num_forwards:  # else all parameters were whole, and there was nothing to learn
            self._num_forwards += 1
        if self._num_forwards == 1:
            return
        if self._num_forwards == 2:
            self._plan_lists()
        if self._depth:
            for module, following in self._following.items():
                if not compat.prefetch_lists(module)[0]:
                    self._listed_forward.append(module)
                    module.set_modules_to_forward_prefetch(following)
            # FSDP2 waits for the first module's parameters before it asks for the next ones.
            for module in self._order[: self._depth + 1]:
                module.unshard(async_op=True)

    def _end_forward(self, *ignored: Any) -> None:
        self.in_forward = False
        self._clear_forward_lists()
        if current_backward() == -1:
            self._drop_unused()  # a backward that uses it nevertheless gathers it again

    def _drop_unused(self) -> None:
        """Free parameters of modules that did not run: FSDP2 would take them for later values, too."""
        for module in list(self._unused):
            if compat.holds_a_gather(module):
                module.unshard()
                module.reshard()
        self._unused.clear()

    def _clear_forward_lists(self) -> None:
        while self._listed_forward:
            self._listed_forward.pop().set_modules_to_forward_prefetch([])

    def _plan_lists(self) -> None:
        order = self._order
        if self._depth is None:
            self._depth = len(order) if all(map(compat.keeps_parameters, order)) else _DEFAULT_DEPTH
        depth = self._depth
        if not depth:
            return
        for index, module in enumerate(order):
            if any(compat.prefetch_lists(module)):
                continue
            if depth + 1 < len(order):  # else the beginning of a forward asks for all
                self._following[module] = order[index + 1 : index + 1 + depth]
            self._listed_backward[module] = order[max(0, index - depth) : index][::-1]
        # The root runs first in backward, too, as its output is the last one.
        root = self._root
        if isinstance(root, FSDPModule) and (root in self._listed_backward or not any(compat.prefetch_lists(root))):
            self._listed_backward[root] = [module for module in order[::-1] if module is not root][:depth]
        for module, listed in self._listed_backward.items():
            module.set_modules_to_backward_prefetch(listed)

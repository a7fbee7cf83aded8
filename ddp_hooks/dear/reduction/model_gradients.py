"""The model's ``.grad`` between backward and step, and after the step until the next backward.

Reduced gradients live in shards, where ``zero_grad`` on the model cannot reach them, and the model's ``.grad`` is
neither local nor reduced. So guards stand there (:mod:`~ddp_hooks.intercept.guards`), and in shards that the user has
seen. A guard in its place says that the gradient behind it is wanted; a guard that is gone or zeroed says that the user
has called ``zero_grad``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ddp_hooks.comm import see
from ddp_hooks.comm.torch_compat.autograd import queue_engine_callback
from ddp_hooks.comm.torch_compat.overrides import without_overrides
from ddp_hooks.dear.layout.memory import ManagedParameters
from ddp_hooks.dear.layout.placement import Shards, held_in_shards
from ddp_hooks.intercept import GradientGuard


class ModelGradients:
    def __init__(self, parameters: ManagedParameters, shards: Shards) -> None:
        self.marks = parameters.gradients  # returns what stands at every parameter's .grad
        self._parameters = parameters.tensors
        self._names = parameters.names
        self._shards = shards
        self._guards = [
            GradientGuard.standing_for(parameter, name, held_in_shards)
            for parameter, name in zip(parameters.tensors, parameters.names, strict=True)
        ]
        self._kept: list[int] = []  # parameters with gradients of earlier backwards, while DDP prepares a forward
        self._carried: list[int] = []  # likewise, since the latest backward began
        self._hooks: list[Any] = []  # handles of hooks that notice the next backward

    # -- between backward and step ----------------------------------------------------------------------------------

    def guard_model(self) -> set[int]:
        """Guard every gradient of the model, after a backward; return the parameters that took part."""
        used = {index for index, gradient in enumerate(self.marks()) if gradient is not None}
        for index in used.union(self._carried):  # also where this rank has no shard
            self._place(index)
        return used

    def keep_as_base(self) -> None:
        """Set the gradients of earlier backwards aside, until the gradients of the last backward arrive."""
        for shard in self._shards:
            gradient = shard.tensor.grad
            if gradient is not None:
                shard.base, shard.tensor.grad = gradient, None

    def apply_zero_grad(self, index: int, gradient: Tensor | None, marks: Sequence[Tensor | None]) -> Tensor | None:
        """Return a parameter's ``gradient``, or zeros or None if ``zero_grad`` was called since the backward."""
        mark = marks[index]
        if gradient is None or not isinstance(mark, GradientGuard):
            return None
        return torch.zeros_like(gradient) if mark.zeroed else gradient

    def unreduced(self) -> str | None:
        """Return the name of a parameter whose gradient was not reduced; None if there is none."""
        marks = zip(self._names, self.marks(), strict=True)
        return next((name for name, mark in marks if mark is not None and not isinstance(mark, GradientGuard)), None)

    # -- reduced, but not stepped on yet ----------------------------------------------------------------------------

    def hide(self) -> None:
        """Put guards in the place of reduced gradients until the step, so that no rank reads its shards alone."""
        for shard in self._shards:
            if shard.tensor.grad is not None and not isinstance(shard.tensor.grad, GradientGuard):
                shard.hidden = shard.tensor.grad
                shard.guard.zeroed = False
                shard.tensor.grad = shard.guard

    def release(self) -> None:
        """Bring hidden gradients back, with ``zero_grad`` applied to them."""
        marks = self.marks()
        for shard in self._shards:
            gradient, reduced, shard.hidden = shard.tensor.grad, shard.hidden, None
            if gradient is None:
                continue
            if isinstance(gradient, GradientGuard) and reduced is not None:  # else it was set after that, or is old
                gradient = torch.zeros_like(reduced) if gradient.zeroed else reduced
            shard.tensor.grad = self.apply_zero_grad(shard.range.parameter, gradient, marks)

    def clear_zeroed_flags(self) -> None:
        """Forget calls of ``zero_grad`` that were applied: what is written into gradients from now on counts."""
        for gradient in self.marks():
            if isinstance(gradient, GradientGuard):
                gradient.zeroed = False

    # -- from one backward to the next ------------------------------------------------------------------------------

    def save_and_clear(self, wait: Callable[[], None]) -> None:
        """Copy shards' gradients, after ``wait()``, and remove guards: the coming backward writes where they are."""
        self._remove_hooks()
        self._carried = []
        marks = self.marks()
        if all(mark is None for mark in marks):  # by zero_grad: there is nothing to keep
            self._kept = []
            for shard in self._shards:
                shard.hidden = shard.tensor.grad = None
            return
        self.release()
        self._kept = [i for i, mark in enumerate(marks) if isinstance(mark, GradientGuard)]
        kept = set(self._kept)
        if kept:
            wait()
        for shard in self._shards:
            gradient = shard.tensor.grad
            if gradient is not None:  # without a guard, model.zero_grad() took it away
                shard.tensor.grad = gradient.clone() if shard.range.parameter in kept else None
        self.clear()

    def guard_kept(self, synchronised: bool) -> None:
        """Let zero_grad reach kept gradients until the backward begins.

        Called when DDP is about to call the model: before that it may rebuild its buckets, and would copy the guards.
        """
        kept, self._kept = self._kept, []
        if not kept:
            return
        for index in kept:
            # Not _place(): a guard that was zeroed stays so.
            self._parameters[index].grad = self._guards[index]

        def backward_begins(_: Tensor) -> None:
            if self._hooks:
                self._remove_hooks()
                self._keep_or_discard(kept, synchronised)
                if not synchronised and self._carried:
                    queue_engine_callback(self._carry_on)

        # Any parameter may be the first; a gradient must not be added to a guard.
        self._hooks = [p.register_hook(backward_begins) for p in self._parameters if p.requires_grad]

    def _carry_on(self) -> None:
        """Guard zeros that a backward without synchronisation has not touched."""
        for index in self._carried:
            if self._parameters[index].grad is None:
                self._place(index)
                self._guards[index].zeroed = True

    def clear(self) -> None:
        with without_overrides():
            for parameter in self._parameters:
                if isinstance(parameter.grad, GradientGuard):
                    parameter.grad = None

    def close(self) -> None:
        self._remove_hooks()
        self.clear()

    def zero_grad(self, set_to_none: bool) -> None:
        if set_to_none:
            with without_overrides():
                for parameter in self._parameters:
                    parameter.grad = None
            return
        for gradient in self.marks():
            if gradient is not None:
                gradient.zero_()

    def _place(self, index: int) -> None:
        self._guards[index].zeroed = False
        self._parameters[index].grad = self._guards[index]

    def _remove_hooks(self) -> None:
        for handle in self._hooks:
            handle.remove()
        self._hooks = []

    def _keep_or_discard(self, kept: list[int], synchronised: bool) -> None:
        marks = {index: self._parameters[index].grad for index in kept}
        self._carried = [index for index, mark in marks.items() if isinstance(mark, GradientGuard)]
        for index, mark in marks.items():
            if isinstance(mark, GradientGuard) and not mark.zeroed and not synchronised:
                raise RuntimeError(
                    f"a backward under no_sync() follows a synchronised one without optimizer.step() or zero_grad() "
                    f"between them ({self._names[index]}): accumulate under no_sync() first, and synchronise last"
                    f"{see('no-sync-comes-too-late')}"
                )
        for shard in self._shards:
            if shard.range.parameter in marks and shard.tensor.grad is not None:
                mark = marks[shard.range.parameter]
                if not isinstance(mark, GradientGuard):
                    shard.tensor.grad = None
                elif mark.zeroed:
                    shard.tensor.grad.zero_()
        self.clear()

"""Who owns a gradient between backward and step, and after it until the next backward.

Reduced gradients live in shards, where ``zero_grad`` on the model cannot reach them, and the model's ``.grad`` means
nothing. So guards stand there (:mod:`~ddp_hooks.intercept.guards`), and in shards that the user has seen. One in its
place says that the gradient behind it is wanted; one that was removed or zeroed says what the user has done to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ddp_hooks.comm import see, torch_compat
from ddp_hooks.dear.update import Update, held_in_shards
from ddp_hooks.intercept import GradientGuard


class GradientKeeper:
    """Puts guards in the place of gradients, and reads from them what became of what they stand for.

    Args:
        parameters: the parameters that are reduced, in a fixed order.
        names: their names, for messages.
        sharded: the shards that hold the reduced gradients.
    """

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], names: Sequence[str], sharded: Update
    ) -> None:
        self._parameters = parameters
        self._names = names
        self._sharded = sharded
        self._guards = [
            GradientGuard.standing_for(parameter, name, held_in_shards)
            for parameter, name in zip(parameters, names, strict=True)
        ]
        self._kept: list[int] = []  # parameters with gradients of earlier backwards, while DDP prepares a forward
        self._carried: list[int] = []  # likewise, since the latest backward began
        self._watch: list[Any] = []  # handles of hooks that notice the next backward

    # -- between backward and step ----------------------------------------------------------------------------------

    def guard_model(self) -> set[int]:
        """A backward has ended: guard every gradient of the model; returns the parameters that took part."""
        used = {index for index, gradient in enumerate(self.marks()) if gradient is not None}
        for index in used.union(self._carried):  # also where this rank has no shard
            self._place(index)
        return used

    def keep_as_base(self) -> None:
        """Put what shards have accumulated so far aside, until the gradients of the last backward arrive."""
        for shard in self._sharded.shards:
            gradient = shard.tensor.grad
            if gradient is not None:
                shard.base, shard.tensor.grad = gradient, None

    def marks(self) -> list[Tensor | None]:
        """Return what stands for gradients at the parameters, and says what the user has done to them."""
        with torch_compat.without_overrides():  # nobody waits for parameters in flight
            return [parameter.grad for parameter in self._parameters]

    def unless_discarded(self, index: int, gradient: Tensor | None, marks: Sequence[Tensor | None]) -> Tensor | None:
        """``gradient``, or what ``zero_grad`` on the model or the optimizer has made of it since the backward.

        Args:
            index: of the parameter.
            gradient: as it was reduced.
            marks: see :meth:`marks`.
        """
        mark = marks[index]
        if gradient is None or not isinstance(mark, GradientGuard):
            return None
        return torch.zeros_like(gradient) if mark.zeroed else gradient

    def unreduced(self) -> str | None:
        """The name of a parameter that holds a gradient that no rank has reduced; None if there is none."""
        for name, gradient in zip(self._names, self.marks(), strict=True):
            if gradient is not None and not isinstance(gradient, GradientGuard):
                return name
        return None

    # -- reduced, but not stepped on yet ----------------------------------------------------------------------------

    def withdraw(self) -> None:
        """Hide reduced gradients behind guards until the step: a rank that read its shards alone would go astray."""
        for shard in self._sharded.shards:
            if shard.tensor.grad is not None and not isinstance(shard.tensor.grad, GradientGuard):
                shard.reduced = shard.tensor.grad
                shard.guard.zeroed = False
                shard.tensor.grad = shard.guard

    def release(self) -> None:
        """Bring reduced gradients back, as far as ``zero_grad`` has left them."""
        marks = self.marks()
        for shard in self._sharded.shards:
            gradient, reduced, shard.reduced = shard.tensor.grad, shard.reduced, None
            if gradient is None:
                continue
            if isinstance(gradient, GradientGuard) and reduced is not None:  # else it was set after that, or is old
                gradient = torch.zeros_like(reduced) if gradient.zeroed else reduced
            shard.tensor.grad = self.unless_discarded(shard.interval.parameter, gradient, marks)

    def forget_zeroing(self) -> None:
        """What was asked for is done: what is written into gradients from now on counts."""
        for gradient in self.marks():
            if isinstance(gradient, GradientGuard):
                gradient.zeroed = False

    # -- from one backward to the next ------------------------------------------------------------------------------

    def make_room(self, settle: Callable[[], None]) -> None:
        """The coming backward writes DDP's buckets and the model's ``.grad``: save shards' gradients, clear guards.

        Args:
            settle: waits for gradients that may still travel; called before any is read.
        """
        self._unwatch()
        self._carried = []
        marks = self.marks()
        if all(mark is None for mark in marks):  # by zero_grad: there is nothing to keep
            self._kept = []
            for shard in self._sharded.shards:
                shard.reduced = shard.tensor.grad = None
            return
        self.release()
        self._kept = [i for i, mark in enumerate(marks) if isinstance(mark, GradientGuard)]
        kept = set(self._kept)
        if kept:
            settle()
        for shard in self._sharded.shards:
            gradient = shard.tensor.grad
            if gradient is not None:  # without a guard, model.zero_grad() took it away
                shard.tensor.grad = gradient.clone() if shard.interval.parameter in kept else None
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
            if self._watch:
                self._unwatch()
                self._keep_or_discard(kept, synchronised)
                if not synchronised and self._carried:
                    torch_compat.queue_engine_callback(self._carry_on)

        # Any parameter may be the first; a gradient must not be added to a guard.
        self._watch = [p.register_hook(backward_begins) for p in self._parameters if p.requires_grad]

    def _carry_on(self) -> None:
        """A backward without synchronisation has ended: what it has not touched is as zero as it was."""
        for index in self._carried:
            if self._parameters[index].grad is None:
                self._place(index)
                self._guards[index].zeroed = True

    def clear(self) -> None:
        """Remove the model's guards."""
        with torch_compat.without_overrides():
            for parameter in self._parameters:
                if isinstance(parameter.grad, GradientGuard):
                    parameter.grad = None

    def close(self) -> None:
        """Remove guards and hooks."""
        self._unwatch()
        self.clear()

    def zero_grad(self, set_to_none: bool) -> None:
        """The model's side of ``optimizer.zero_grad()``, which finds nothing to drop then."""
        if set_to_none:
            with torch_compat.without_overrides():
                for parameter in self._parameters:
                    parameter.grad = None
            return
        for gradient in self.marks():
            if gradient is not None:
                gradient.zero_()

    def _place(self, index: int) -> None:
        self._guards[index].zeroed = False
        self._parameters[index].grad = self._guards[index]

    def _unwatch(self) -> None:
        for handle in self._watch:
            handle.remove()
        self._watch = []

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
        for shard in self._sharded.shards:
            if shard.interval.parameter in marks and shard.tensor.grad is not None:
                mark = marks[shard.interval.parameter]
                if not isinstance(mark, GradientGuard):
                    shard.tensor.grad = None
                elif mark.zeroed:
                    shard.tensor.grad.zero_()
        self.clear()

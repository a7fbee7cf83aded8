"""Gradients that a backward has made on one rank alone, and steps with them, which are refused.

DDP reduces the first backward after each forward outside of ``no_sync()``. Any other adds this rank's gradients to what
is there. A step after that moves every rank in a direction of its own; plain DDP lets it happen without a word.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from ddp_hooks.comm import compat, see
from ddp_hooks.feed.guard import GradientGuard
from ddp_hooks.feed.inert import InertOnCopy


class LocalGradients:
    """Notices backwards that DDP does not reduce, by the outputs of forwards through DDP.

    Args:
        ddp: the model.
        parameters, names: that it reduces.
    """

    def __init__(
        self, ddp: DistributedDataParallel, parameters: Sequence[torch.nn.Parameter], names: Sequence[str]
    ) -> None:
        self._name_of = {id(parameter): name for parameter, name in zip(parameters, names, strict=True)}
        self._num_buckets = 0  # that DDP has handed over so far
        self._task = -1  # the latest backward that was noticed
        self._are_here = False
        reference = weakref.ref(self)  # torch and the model keep hooks for as long as nobody removes them
        self._handles: list[Any] = [
            ddp.register_forward_hook(InertOnCopy(_calling(reference, LocalGradients._after_forward))),
            register_optimizer_step_pre_hook(_calling(reference, LocalGradients._before_step)),
        ]
        for handle in self._handles:
            weakref.finalize(self, handle.remove)

    def bucket_came(self) -> None:
        """DDP hands over a bucket: what lies there on this rank is reduced with the rest."""
        self._num_buckets += 1
        self._are_here = False

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _after_forward(self, ddp: Any, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        hook = _calling(weakref.ref(self), LocalGradients._reached)
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(hook)

    def _reached(self, gradient: Tensor) -> None:
        """A gradient has come to an output: of a backward, or of ``autograd.grad()``, which fills no ``.grad``."""
        task = compat.backward_id()
        if task != self._task and compat.backward_reaches_leaves():
            self._task = task
            before = self._num_buckets
            compat.queue_after_hooks(lambda: self._ended(before))

    def _ended(self, num_buckets: int) -> None:
        if self._num_buckets == num_buckets:
            self._are_here = True

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        def checking(closure: Callable[[], Any]) -> Callable[[], Any]:
            def evaluate() -> Any:
                loss = closure()
                self._refuse(optimizer)
                return loss

            return evaluate

        replaced = compat.with_closure(args, kwargs, checking)
        if replaced is None:
            self._refuse(optimizer)
        return replaced

    def _refuse(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise if the optimizer would step with gradients of this rank alone."""
        if not self._are_here:
            return
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if id(parameter) in self._name_of and _has_values(parameter.grad):
                raise RuntimeError(
                    f"the gradient of {self._name_of[id(parameter)]} was not reduced over the ranks, so each of them "
                    "would step in a direction of its own: the last backward ran under no_sync(), or for the second "
                    "time through one forward. Leave no_sync() before the last backward of a step, and run one "
                    "backward for each forward, with the sum of the losses; to drop these gradients call zero_grad()"
                    f"{see('gradients-were-not-reduced')}"
                )


def _calling(reference: weakref.ref[LocalGradients], method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        present = reference()
        return method(present, *args) if present is not None else None

    return call


def _has_values(gradient: Tensor | None) -> bool:
    if gradient is None or isinstance(gradient, GradientGuard):
        return False
    return bool((gradient.coalesce().values() if gradient.is_sparse else gradient).any())

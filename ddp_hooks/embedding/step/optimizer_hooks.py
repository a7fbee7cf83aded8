"""Hooks of optimizers: the tables' own, the one that they follow, and any other that may step with scaled gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ddp_hooks.comm import Work, see
from ddp_hooks.comm.torch_compat.optimizer import evaluated_once, inside_grad_scaler, is_inner_step, with_closure
from ddp_hooks.comm.torch_compat.state_dict import inside_making_state, makes_state
from ddp_hooks.embedding.step.scheduler import StepScheduler
from ddp_hooks.intercept import around_step, extend_zero_grad


class OptimizerHooks:
    """Turns steps of optimizers into steps of the tables; ``before_step`` runs before each step of their own."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, scheduler: StepScheduler, before_step: Callable[[], None]
    ) -> None:
        self.followed: torch.optim.Optimizer | None = None  # tables step and zero gradients with it
        self.urgent_works: Sequence[Work] = ()  # sent before this step's delayed rows
        self._optimizer = optimizer
        self._updates = scheduler.split_step.updates
        self._scheduler = scheduler
        self._before_step = before_step
        self._steps_with_followed = False
        self._of_followed: list[Any] = []
        self._handles: list[Any] = [
            *around_step(optimizer, self._before_own_step, self._after_own_step),
            extend_zero_grad(optimizer, self._drop_gradients),
            _before_any_step(self),
        ]

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        self.followed, self._scheduler.is_followed = optimizer, True
        self._of_followed = [
            *around_step(optimizer, self._before_followed_step, self._after_followed_step),
            extend_zero_grad(optimizer, self._drop_gradients),
        ]

    def unfollow(self) -> None:
        for handle in self._of_followed:
            handle.remove()
        self.followed, self._scheduler.is_followed, self._of_followed = None, False, []

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def would_miss_step(self, optimizer: torch.optim.Optimizer) -> bool:
        if self.followed is not None or not self._scheduler.split_step.has_gradients:
            return False
        ours = {id(parameter) for parameter in self._scheduler.whole_model().parameters()}
        return any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"])

    def _before_own_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._updates.deferred.running:
            return
        if makes_state(kwargs):
            self._updates.begin_making_state()
            return
        if with_closure(args, kwargs, lambda closure: closure) is not None:
            raise RuntimeError(
                "tables.optimizer.step() takes no closure: run backward before it, or let the tables follow() the "
                f"optimizer whose step() has the closure{see('how-step-is-called')}"
            )
        self._before_step()
        self._scheduler.begin_step()

    def _after_own_step(self, *_: Any) -> None:
        if inside_making_state():
            self._updates.end_making_state()
        elif not (self._updates.deferred.running or self._steps_with_followed):
            self._scheduler.end_step()

    def _drop_gradients(self, _: bool) -> None:
        if not inside_making_state():  # torch zeroes the gradients that it has made itself
            self._scheduler.drop_gradients()

    def _before_followed_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if is_inner_step(optimizer) or makes_state(kwargs):
            return None
        # The user's closure runs backward; the tables' step follows inside of it, so that no hook zeroes between them.
        replaced = with_closure(
            args, kwargs, lambda closure: evaluated_once(closure, self._step_with_followed, "sharded tables support")
        )
        if replaced is None:
            self._step_with_followed()
        return None if isinstance(optimizer, torch.optim.LBFGS) else replaced

    def _after_followed_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if is_inner_step(optimizer) or makes_state(kwargs):
            return
        if isinstance(optimizer, torch.optim.LBFGS):  # the last evaluation of its closure counts
            self._step_with_followed()
        self._scheduler.end_step(self.urgent_works)
        self.urgent_works = ()

    def _step_with_followed(self) -> None:
        self._steps_with_followed = True
        try:
            self._optimizer.step()  # schedulers look for this call
        finally:
            self._steps_with_followed = False

    def refuse_stock_scaler(self, optimizer: torch.optim.Optimizer) -> None:
        step = self._scheduler.split_step
        if step.is_unscaled or not (step.has_gradients and inside_grad_scaler()):
            return
        if optimizer is self.followed or self.would_miss_step(optimizer):
            raise RuntimeError(
                "torch.amp.GradScaler does not see the gradients of sharded tables, which would stay scaled: use "
                "ddp_hooks.GradScaler instead, with the same arguments, and let the tables follow() the optimizer that "
                f"it steps{see('stock-gradscaler')}"
            )


def _before_any_step(hooks: OptimizerHooks) -> RemovableHandle:
    reference = weakref.ref(hooks)  # torch keeps the hook until somebody removes it

    def look(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if (present := reference()) is not None:
            present.refuse_stock_scaler(optimizer)

    handle = register_optimizer_step_pre_hook(look)
    weakref.finalize(hooks, handle.remove)
    return handle

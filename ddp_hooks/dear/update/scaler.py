"""GradScaler for sharded gradients and tables: ranks look for overflows in their own parts, and act together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from ddp_hooks.comm import calling, see
from ddp_hooks.dear.refusals import state_of
from ddp_hooks.intercept.co_optimizers import GradientShards, co_optimizers_of, would_leave_gradients


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler``, also for optimizers under a :class:`~ddp_hooks.DearState`; same arguments and use.

    Gradients are unscaled in this rank's shards, and in sharded tables that follow the optimizer. Whether one of them
    overflowed is reduced over the ranks before anything reads it, so that all ranks skip the same steps and keep the
    same scale. The stock scaler would look at its own part alone; it raises, naming this class. Other optimizers are
    treated as the stock scaler does.
    """

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step, unless a gradient overflowed on any rank; collective.

        Raises:
            RuntimeError: a second step before ``update()``, or a closure, as the stock scaler does.
        """
        if self._enabled and would_leave_gradients(optimizer):
            raise RuntimeError(
                "sharded tables have scaled gradients, and follow no optimizer with which they would be unscaled: call "
                f"tables.follow(optimizer) once, with the optimizer that the scaler steps{see('stock-gradscaler')}"
            )
        if not self._enabled or (state_of(optimizer) is None and not co_optimizers_of(optimizer)):
            return super().step(optimizer, *args, **kwargs)
        if any(given is not None for given in (*args, kwargs.pop("closure", None))):
            raise RuntimeError(f"GradScaler.step() takes no closure: run backward before it{see('how-step-is-called')}")
        progress = self._per_optimizer_states[id(optimizer)]
        if progress["stage"] is OptState.STEPPED:
            raise RuntimeError(f"step() has already been called since the last update(){see('how-step-is-called')}")
        if progress["stage"] is OptState.READY:
            self.unscale_(optimizer)
        # Not torch's way for fused optimizers, which step even then and ignore the gradients by themselves.
        result = self._maybe_opt_step(optimizer, progress, **kwargs)
        progress["stage"] = OptState.STEPPED
        return result

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Change the scale as torch's scaler does, and with it the scale of what rounded gradients left out."""
        progress = self._per_optimizer_states.values() if self._enabled else ()
        states = [each["dear"] for each in progress if "dear" in each]
        rounding = [state for state in states if state.config.rounds_to is not None]
        before = self.get_scale() if rounding else 1.0
        super().update(new_scale)
        for state in rounding:
            state.scale_residuals(self.get_scale() / before)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        state, co_optimizers = state_of(optimizer), co_optimizers_of(optimizer)
        if state is None and not co_optimizers:
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        if state is None:
            found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        else:
            self._per_optimizer_states[id(optimizer)]["dear"] = state
            with state.reduced_gradients() as shards:
                holders = SimpleNamespace(param_groups=[{"params": [*shards, *state.other_parameters]}])
                found = super()._unscale_grads_(cast(torch.optim.Optimizer, holders), inv_scale, found_inf, allow_fp16)
        overflowed = [co_optimizer.unscale(inv_scale.item()) for co_optimizer in co_optimizers]
        # A rank may hold no shard at all, and has to hear of overflows nevertheless.
        flags = [found_inf, *found.values(), torch.tensor(float(any(overflowed)))]
        ranks: GradientShards = state if state is not None else co_optimizers[0]
        device = state.device if state is not None else found_inf.device
        with calling("GradScaler.unscale_() or step()"):
            largest = ranks.largest_over_ranks(torch.stack([flag.to(device) for flag in flags]).max())
        return {device: largest.to(device)}

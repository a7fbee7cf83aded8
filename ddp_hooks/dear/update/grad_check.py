"""Check of gradients before every update: clip them, and act together if some are not finite."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_hooks.comm import calling, gather_objects, see
from ddp_hooks.dear.config import DearConfig
from ddp_hooks.dear.layout.memory import ManagedParameters
from ddp_hooks.dear.update.base import Update
from ddp_hooks.dear.update.clipping import gradients_of, norm_of, power_of, scale_down
from ddp_hooks.intercept.co_optimizers import CoOptimizer

logger = logging.getLogger("ddp_hooks")


@dataclass
class GradCheck:
    """Clips gradients and finds those that are not finite, as ``config`` asks, just before an update."""

    update: Update
    sum_over_ranks: Callable[[Tensor], Tensor]
    group: dist.ProcessGroup
    parameters: ManagedParameters
    config: DearConfig
    co_optimizers: list[CoOptimizer]
    grad_norm: Tensor | None = None  # before clipping, at the last update
    skipped_steps: int = 0

    @property
    def is_wanted(self) -> bool:
        """True if the settings ask for it."""
        return self.config.max_grad_norm is not None or self.config.on_nonfinite is not None

    @torch.no_grad()
    def approve(self) -> bool:
        """Clip; return False if the update is to be skipped, after dropping the gradients. Collective."""
        with ExitStack() as stack:
            gradients = gradients_of(shard.tensor for shard in self.update.shards)
            for co_optimizer in self.co_optimizers if self.config.max_grad_norm is not None else []:
                gradients += gradients_of(stack.enter_context(co_optimizer.reduced_gradients()))
            return self._approve(gradients)

    def _approve(self, gradients: Sequence[Tensor]) -> bool:
        mine = torch.stack([self._nonfinite(gradients), self._power(gradients)])
        with calling("optimizer.step(), which looks at all gradients"):
            count, power = self.sum_over_ranks(mine)
        if self.config.on_nonfinite is not None and count > 0:
            found = self._where()
            if self.config.on_nonfinite == "raise":
                raise RuntimeError(
                    f"gradients are not finite, so no rank updates anything: {found}{see('gradients-are-not-finite')}"
                )
            self.skipped_steps += 1
            logger.warning("skipped an update on all ranks, gradients are not finite: %s", found)
            self.update.drop_gradients()
            for co_optimizer in self.co_optimizers:
                co_optimizer.zero_grad()
            return False
        if self.config.max_grad_norm is not None:
            self.grad_norm = norm_of([power], 2.0)
            scale_down(gradients, self.config.max_grad_norm, self.grad_norm)
        return True

    def _nonfinite(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return 1 if a gradient of this rank is not finite, else 0; a float64 scalar."""
        if self.config.on_nonfinite is None:
            return self._zero()
        if any(co_optimizer.found_nonfinite() for co_optimizer in self.co_optimizers):
            return self._zero() + 1.0
        if not gradients:
            return self._zero()
        return (~torch.isfinite(torch.nn.utils.get_total_norm(gradients, torch.inf))).double()

    def _power(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the sum of squares, a float64 scalar."""
        return power_of(gradients, 2.0) if self.config.max_grad_norm is not None and gradients else self._zero()

    def _zero(self) -> Tensor:
        return torch.zeros((), dtype=torch.float64, device=self.parameters.device)

    def _where(self) -> str:
        mine = [
            self.parameters.names[shard.range.parameter]
            for shard in self.update.shards
            if shard.tensor.grad is not None and not torch.isfinite(shard.tensor.grad).all()
        ]
        mine += ["a sharded table"] if any(other.found_nonfinite() for other in self.co_optimizers) else []
        everyone = gather_objects(mine, self.group, "optimizer.step(), with gradients that are not finite", self.config)
        names = list(dict.fromkeys(name for found in everyone for name in found))
        return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")

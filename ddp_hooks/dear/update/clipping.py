"""Gradient clipping over shards, with one all-reduce of a scalar, and the check of gradients before every update."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_hooks.comm import calling, gather_objects, see
from ddp_hooks.dear.config import DearConfig
from ddp_hooks.dear.layout.memory import ManagedParameters
from ddp_hooks.dear.update.base import Update
from ddp_hooks.intercept.co_optimizers import CoOptimizer, GradientShards

logger = logging.getLogger("ddp_hooks")


@calling("clip_grad_norm_()")
@torch.no_grad()
def clip_grad_norm_(
    sources: Iterable[GradientShards | Tensor | Iterable[Tensor]],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Clip the common norm of several sets of gradients, as ``torch.nn.utils.clip_grad_norm_`` does for one.

    Between backward and ``optimizer.step()``; collective over the group of every state, in the order given.

    Args:
        sources: states, whose model's gradients are meant, with those of its sharded tables; tables; and tensors or
            lists of tensors with the same gradients on every rank (a module under plain DDP, for instance), or DTensors
            (one under FSDP2).
        max_norm: largest norm that is left as it is.
        norm_type: p of the p-norm, > 0; ``math.inf`` for the largest absolute value.
        error_if_nonfinite: raise, on every rank, if the norm is not finite.

    Returns:
        The norm before clipping, a float64 scalar: equal on every rank.

    Raises:
        ValueError: ``norm_type`` or ``max_norm`` is not one.
        RuntimeError: ``error_if_nonfinite``, and the norm is not finite; gradients are as they were.
    """
    max_norm, norm_type = checked_norm(max_norm, norm_type)
    shards: list[GradientShards] = []
    tensors: list[Tensor] = []
    for source in [sources] if isinstance(sources, GradientShards | Tensor) else sources:
        if isinstance(source, GradientShards):
            shards.append(source)
        else:
            tensors += [source] if isinstance(source, Tensor) else source
    shards += [beside for source in shards for beside in getattr(source, "co_optimizers", ()) if beside not in shards]
    replicated = gradients_of(tensors)
    with ExitStack() as stack:
        gradients = [gradients_of(stack.enter_context(source.reduced_gradients())) for source in shards]
        parts = [total_power(part, source, norm_type) for part, source in zip(gradients, shards, strict=True)]
        if replicated:
            parts.append(power_of(replicated, norm_type))
        total = norm_of(parts, norm_type)
        if error_if_nonfinite and not torch.isfinite(total):
            raise RuntimeError(
                f"the gradients' norm of order {norm_type} is {total.item()} on every rank, so it cannot be clipped: "
                f"skip such steps with DearConfig(on_nonfinite='skip'), or clip with error_if_nonfinite=False"
                f"{see('gradients-are-not-finite')}"
            )
        scale_down([*(gradient for part in gradients for gradient in part), *replicated], max_norm, total)
    return total


def checked_norm(max_norm: float, norm_type: float) -> tuple[float, float]:
    """Return a bound and an order of a norm as floats, from whatever torch takes for them, also ``"inf"``."""
    try:
        bound, order = float(max_norm), float(norm_type)
    except (TypeError, ValueError) as error:
        raise ValueError(f"max_norm and norm_type must be numbers, got {max_norm!r} and {norm_type!r}") from error
    if not order > 0:
        raise ValueError(f"norm_type must be > 0 or math.inf, got {order}")
    if not bound >= 0:
        raise ValueError(f"max_norm must be >= 0, got {bound}")
    return bound, order


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients that are not None and not empty: torch takes no infinity norm of empty ones."""
    return [p.grad for p in parameters if p.grad is not None and p.grad.numel() > 0]


def total_power(gradients: Sequence[Tensor], shards: GradientShards, norm_type: float) -> Tensor:
    """Return the sum of powers, or the largest value, of all ranks' gradients; collective."""
    power = power_of(gradients, norm_type)
    if norm_type < math.inf:
        return shards.sum_over_ranks(power)
    # Backends disagree on the larger of a number and NaN.
    pair = torch.stack([power.nan_to_num(nan=0.0, posinf=math.inf), power.isnan().double()])
    largest, is_nan = shards.largest_over_ranks(pair)
    return torch.where(is_nan > 0, math.nan, largest)


def norm_of(powers: Sequence[Tensor], norm_type: float) -> Tensor:
    """Return the norm, a float64 scalar, of sets with these sums of powers (or largest values)."""
    if not powers:
        return torch.zeros((), dtype=torch.float64)
    stacked = torch.stack([power.to(powers[0].device) for power in powers])
    return stacked.sum() ** (1.0 / norm_type) if norm_type < math.inf else stacked.max()


def scale_down(gradients: Sequence[Tensor], max_norm: float, total: Tensor) -> None:
    """Multiply ``gradients``, whose norm is ``total``, so that it becomes at most ``max_norm``; in place."""
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)  # as torch.nn.utils.clip_grads_with_norm_ has it
    for gradient in gradients:
        if hasattr(gradient, "full_tensor"):
            gradient.mul_(factor.item())
        else:
            gradient.mul_(factor.to(gradient.device, gradient.dtype))


def power_of(gradients: Sequence[Tensor], norm_type: float) -> Tensor:
    """Return the sum of powers, or the largest absolute value, a float64 scalar."""
    norm = torch.nn.utils.get_total_norm(gradients, norm_type)
    if hasattr(norm, "full_tensor"):  # a DTensor, each rank of which has a part; to import the class takes a while
        norm = norm.full_tensor()
    norm = norm.double()
    return norm**norm_type if norm_type < math.inf else norm


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
        looks, clips = self.config.on_nonfinite is not None, self.config.max_grad_norm is not None
        mine = torch.zeros(2, dtype=torch.float64, device=self.parameters.device)  # not finite?; power
        if looks and any(co_optimizer.found_nonfinite() for co_optimizer in self.co_optimizers):
            mine[0] = 1.0
        elif looks and gradients:
            mine[0] = ~torch.isfinite(torch.nn.utils.get_total_norm(gradients, torch.inf))
        if clips and gradients:
            mine[1] = power_of(gradients, 2.0)
        with calling("optimizer.step(), which looks at all gradients"):
            count, power = self.sum_over_ranks(mine)
        if looks and count > 0:
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

"""AdamW for gradients of a few rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ddp_hooks.comm import see


class RowwiseAdamW(torch.optim.Optimizer):
    """AdamW (loshchilov2019) that updates only the rows of a sparse gradient.

    As in ``torch.optim.SparseAdam``, moments of a row decay when the row has a gradient, and the step that corrects
    their bias counts all updates. Weight decay, too, reaches a row only when it has a gradient. ``torch.optim.AdamW``
    would shrink and move all rows of a table in every step.

    Args:
        params: parameters with sparse gradients (``nn.Embedding(sparse=True)``), or tables of
            :func:`~ddp_hooks.shard_embeddings`.
        betas: decay of the running averages of the gradient and its square, each in [0, 1).
        eps: added to the denominator.
        weight_decay: a row with a gradient is multiplied by ``1 - lr * weight_decay`` before its update.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
    ) -> None:
        if not lr >= 0.0:
            raise ValueError(f"lr must be >= 0, got {lr}")
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"betas must be in [0, 1), got {betas}")
        if not (eps >= 0.0 and weight_decay >= 0.0):
            raise ValueError(f"eps and weight_decay must be >= 0, got {eps} and {weight_decay}")
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update the rows that have a gradient; raises ``RuntimeError`` if a gradient is not sparse."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        if not parameter.grad.is_sparse:  # type: ignore[union-attr]
            raise RuntimeError(
                "RowwiseAdamW takes sparse gradients, this one is dense: construct the table with "
                f"nn.Embedding(..., sparse=True), or use torch.optim.AdamW{see('set-up-is-refused')}"
            )
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        gradient = parameter.grad.coalesce()  # type: ignore[union-attr]
        rows, values = gradient.indices()[0], gradient.values()
        if not values.numel():
            return
        if group["maximize"]:
            values = -values
        lr, (beta1, beta2), step = float(group["lr"]), group["betas"], state["step"]
        weight = parameter.index_select(0, rows).mul_(1.0 - lr * group["weight_decay"])
        mean = state["exp_avg"].index_select(0, rows).mul_(beta1).add_(values, alpha=1.0 - beta1)
        square = state["exp_avg_sq"].index_select(0, rows).mul_(beta2).addcmul_(values, values, value=1.0 - beta2)
        state["exp_avg"].index_copy_(0, rows, mean)
        state["exp_avg_sq"].index_copy_(0, rows, square)
        denominator = square.sqrt_().div_(math.sqrt(1.0 - beta2**step)).add_(group["eps"])
        weight.addcdiv_(mean, denominator, value=-lr / (1.0 - beta1**step))
        parameter.index_copy_(0, rows, weight)

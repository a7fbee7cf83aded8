"""One step of a table optimizer, taken in two parts.

Prior rows are updated in the step, delayed rows later, with the same learning rate and as the same step. (The paper
counts a step with the delayed part only, section 5.7; the first prior update would then divide by 1 - beta ** 0.)
Splitting is exact for optimizers that update a row from its gradient and its state alone, and leave rows without a
gradient as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ddp_hooks.embedding.exchange.gradients import RowSum
from ddp_hooks.embedding.rowwise import RowwiseAdamW
from ddp_hooks.overlap import DeferredUpdates, copied

ROWWISE = (torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam, RowwiseAdamW)


def find_problem(optimizer_class: Any, options: Mapping[str, Any]) -> str | None:
    """Return why an optimizer's updates cannot be split by rows, or None."""
    name = getattr(optimizer_class, "__name__", repr(optimizer_class))
    if optimizer_class not in ROWWISE:
        return (
            f"{name} is not known to update rows one by one and to leave the others alone: give tables an "
            f"optimizer_class of {', '.join(kind.__name__ for kind in ROWWISE)} (SparseAdam for Adam, RowwiseAdamW for "
            f"AdamW)"
        )
    for option in ("momentum", "dampening", "nesterov") if optimizer_class is torch.optim.SGD else ():
        if options.get(option):
            return (
                f"SGD's {option} moves rows that have no gradient, so updates cannot be split by rows: leave it out, "
                f"or use SparseAdam"
            )
    if optimizer_class is not RowwiseAdamW and options.get("weight_decay"):
        return (
            f"weight_decay of {name} does not work with gradients of a few rows: leave it out, or use RowwiseAdamW"
        )
    return None


class TableUpdates:
    """Applies steps of ``optimizer`` to ``weights``, the tables' columns in the order of the tables."""

    def __init__(self, optimizer: torch.optim.Optimizer, weights: Sequence[torch.nn.Parameter]) -> None:
        self._optimizer = optimizer
        self._weights = weights
        self._parts: dict[int, RowSum] = {}
        self._counts: dict[int, Any] = {}  # by table: steps before the present one
        self._deferred = DeferredUpdates(optimizer, weights, self._gradient_of)

    @property
    def running(self) -> bool:
        """True while this thread runs the optimizer's own code for some tables."""
        return self._deferred.running

    def begin(self) -> None:
        """Begin a step with the optimizer's present settings, which must allow to split updates by rows."""
        for group in self._optimizer.param_groups:
            problem = find_problem(type(self._optimizer), group)
            if problem is not None:
                raise ValueError(f"the tables' optimizer was changed: {problem} (OneCycleLR: cycle_momentum=False)")
        self._deferred.note_settings()
        self._counts = {}

    @torch.inference_mode(False)
    @torch.no_grad()
    def apply(self, parts: Mapping[int, RowSum]) -> None:
        """Update rows, by table; all calls until the next :meth:`begin` are one step, and update different rows."""
        if not parts:
            return
        states = {index: self._optimizer.state[self._weights[index]] for index in parts}
        for index, state in states.items():
            if index in self._counts:
                state["step"] = copied(self._counts[index])
        before = {index: copied(state.get("step", 0)) for index, state in states.items()}
        self._parts = dict(parts)
        self._deferred.run(list(parts))
        self._parts = {}
        # An optimizer may not count steps, or begin to in its first one.
        self._counts.update({index: before[index] for index, state in states.items() if "step" in state})

    def begin_making_state(self) -> None:
        """Replace the dense zeros of a step with which torch makes the optimizer's state by gradients of no rows."""
        for weight in self._weights:
            if weight.grad is not None:
                rows = torch.empty(0, dtype=torch.long, device=weight.device)
                weight.grad = _sparse(rows, weight.new_empty(0, weight.shape[1]), weight.shape)

    def end_making_state(self) -> None:
        """Take back the count of such a step."""
        for state in self._optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"] * 0

    def _gradient_of(self, index: int) -> Tensor:
        rows, values = self._parts[index]
        shape = self._weights[index].shape
        if not shape[1]:  # torch reads past the end of rows without columns; the step counts nevertheless
            rows, values = rows[:0], values[:0]
        return _sparse(rows, values, shape)


def _sparse(rows: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    return torch.sparse_coo_tensor(rows[None], values, shape, is_coalesced=True, check_invariants=False)

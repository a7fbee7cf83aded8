"""Residuals as plain tensors, saved by parameter name, for the same or another number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ddp_hooks.comm import (
    find_problem_of_ranks,
    find_problem_of_shapes,
    in_order_of,
    is_dense,
    shaped_like,
    sum_by_name,
)
from ddp_hooks.quantized.backward import Context, Run

_KEYS = {"rank", "world_size", "step", "residual", "runs"}


def residuals_by_name(context: Context) -> dict[str, Tensor]:
    """Return copies of the residuals by name, in the shapes of the parameters."""
    result = {}
    for index, values in sorted(context.residuals.by_parameter().items()):
        like = context.parameters[index]
        result[context.names[index]] = shaped_like(like, values) if is_dense(like) else values.view(like.shape).clone()
    return result


def restore(states: Sequence[Mapping[str, Any]], context: Context) -> None:
    """Replace the residuals by the sums of those in ``states``, in the unit of as many ranks as there are now."""
    total = sum_by_name(states, "residual", context.lanes.world_size)
    loaded = {}
    for index, (name, like) in enumerate(zip(context.names, context.parameters, strict=True)):
        if name in total:
            loaded[index] = in_order_of(total[name], like) if is_dense(like) else total[name].reshape(-1)
    context.residuals.load(loaded)


def runs_by_name(runs: Sequence[Run] | None, context: Context) -> list[list[str]] | None:
    return [[context.names[index] for index in run] for run in runs] if runs is not None else None


def runs_of(names: Sequence[Sequence[str]] | None, context: Context) -> list[Run] | None:
    """Return runs of parameters; None if there are none, or if a run would have several types."""
    if names is None:
        return None
    index_of = {name: index for index, name in enumerate(context.names)}
    runs = [tuple(index_of[name] for name in run) for run in names]
    has_types = all(len({context.parameters[index].dtype for index in run}) == 1 for run in runs)
    return runs if has_types else None


def find_problem(
    saved: Sequence[Mapping[str, Any]], own_rank: int | None, world_size: int, context: Context
) -> str | None:
    """Return the reason why states cannot be loaded, None if they can; without ``own_rank`` they are all ranks'."""
    shapes = {name: p.shape for name, p in zip(context.names, context.parameters, strict=True)}
    for state in saved:
        if missing := _KEYS - set(state):
            return f"this is no state of QuantizedState: it lacks {sorted(missing)}"
        names = sorted(name for run in state["runs"] or [] for name in run)
        if names and names != sorted(shapes):
            return "the state is of other parameters than those that are trained now"
        problem = find_problem_of_shapes("residual", state["residual"], shapes)
        if problem is not None:
            return problem
    return find_problem_of_ranks(saved, own_rank, world_size)

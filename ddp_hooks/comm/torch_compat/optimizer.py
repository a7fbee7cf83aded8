"""Optimizers, their step hooks and closures, and gradient scalers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ddp_hooks.comm.torch_compat import frames_of, is_inside
from ddp_hooks.comm.validation import see


def calls_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if ``step()`` calls hooks, for which ``Optimizer.__init__`` must have run."""
    return hasattr(optimizer, "_optimizer_state_dict_pre_hooks") and getattr(type(optimizer).step, "hooked", False)


def unhooked_step(optimizer: torch.optim.Optimizer) -> Any:
    """Return the optimizer's own ``step``, without hooks; an unbound function."""
    step = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]


def step_hooks(optimizer: torch.optim.Optimizer) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the hooks before and after an optimizer's step, by the ids of their handles, in the order of calls."""
    return optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks


def with_closure(
    args: Any, kwargs: Any, wrap: Callable[[Callable[[], Any]], Callable[[], Any]]
) -> tuple[Any, Any] | None:
    """Return the arguments of ``step()`` with the closure wrapped, for a step pre-hook; None if there is no closure."""
    if kwargs.get("closure") is not None:
        return args, {**kwargs, "closure": wrap(kwargs["closure"])}
    if len(args) > 1 and args[1] is not None:
        return (args[0], wrap(args[1]), *args[2:]), kwargs
    return None


def evaluated_once(closure: Callable[[], Any], then: Callable[[], None], who: str) -> Callable[[], Any]:
    """Return a closure that runs the user's, then ``then``; a second evaluation in one step raises RuntimeError."""
    evaluations = 0

    def evaluate() -> Any:
        nonlocal evaluations
        evaluations += 1
        if evaluations > 1:
            raise RuntimeError(
                f"the optimizer evaluated its closure more than once in one step; {who} one evaluation: use an "
                f"optimizer that needs one, such as SGD or AdamW{see('how-step-is-called')}"
            )
        loss = closure()
        then()
        return loss

    return evaluate


def is_inner_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if a step hook of ``optimizer`` runs for a ``super().step()`` inside of its ``step()``.

    torch wraps the ``step`` of every class of which there was an instance, so hooks may run for each level.
    """
    levels = (frame.f_locals.get("args") for frame in frames_of("torch.optim.optimizer", "wrapper"))
    own = (args for args in levels if args and args[0] is optimizer)
    return len(list(itertools.islice(own, 2))) > 1


def inside_grad_scaler() -> bool:
    """Return True if a gradient scaler's ``step`` has called what runs."""
    return is_inside("torch.amp.grad_scaler", "_maybe_opt_step")


def optimizes_in_backward(parameter: Tensor) -> bool:
    """Return True if ``_apply_optimizer_in_backward`` was applied to the parameter."""
    return bool(getattr(parameter, "_in_backward_optimizers", None))

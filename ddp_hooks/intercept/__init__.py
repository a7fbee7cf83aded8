"""Guards and hooks between users and DDP: whatever cannot be right raises in place of being silently wrong."""

from ddp_hooks.intercept import co_optimizers, ddp_checks
from ddp_hooks.intercept.buckets import future_of, indices_of
from ddp_hooks.intercept.co_optimizers import CoOptimizer
from ddp_hooks.intercept.guards import GradientGuard, SuspendedGuards, clipping_of_frameworks, is_suspended
from ddp_hooks.intercept.module_hooks import NonCopyableHook, refuse_assigned_parameters, refuse_join
from ddp_hooks.intercept.optimizers import ELEMENTWISE, PARAMETERWISE, around_step, extend_zero_grad, when_step_fails

__all__ = [
    "ELEMENTWISE",
    "PARAMETERWISE",
    "CoOptimizer",
    "GradientGuard",
    "NonCopyableHook",
    "SuspendedGuards",
    "around_step",
    "clipping_of_frameworks",
    "co_optimizers",
    "ddp_checks",
    "extend_zero_grad",
    "future_of",
    "indices_of",
    "is_suspended",
    "refuse_assigned_parameters",
    "refuse_join",
    "when_step_fails",
]

"""Updates and parameters that arrive in the next forward: who waits for them where, and what stands in for them."""

from ddp_hooks.feed import companions
from ddp_hooks.feed.aside import GuardsAside, is_aside
from ddp_hooks.feed.assigning import refuse_assigned_parameters
from ddp_hooks.feed.deferred import DeferredUpdates, copied
from ddp_hooks.feed.failing import when_step_fails
from ddp_hooks.feed.guard import GradientGuard, clipping_of_frameworks
from ddp_hooks.feed.inert import InertOnCopy
from ddp_hooks.feed.memory import take_back
from ddp_hooks.feed.optimizers import ELEMENTWISE, PARAMETERWISE
from ddp_hooks.feed.pipe import FeedPipe
from ddp_hooks.feed.stepping import around_step
from ddp_hooks.feed.zeroing import extend_zero_grad

__all__ = [
    "ELEMENTWISE",
    "PARAMETERWISE",
    "DeferredUpdates",
    "FeedPipe",
    "GradientGuard",
    "GuardsAside",
    "InertOnCopy",
    "around_step",
    "clipping_of_frameworks",
    "companions",
    "copied",
    "extend_zero_grad",
    "is_aside",
    "refuse_assigned_parameters",
    "take_back",
    "when_step_fails",
]

"""Predict which hook would help on this model and this network, and by how much; see :mod:`ddp_hooks.planning`."""

from ddp_hooks.planning.plan import Plan, plan, plan_profiled, predict, strategies

__all__ = ["Plan", "plan", "plan_profiled", "predict", "strategies"]

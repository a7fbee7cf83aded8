"""What a step would take with another way to communicate: a cost model, bounds, and a simulator."""

from ddp_hooks.planning.step import StepProfile, TensorUse, profile_of_layers

__all__ = ["StepProfile", "TensorUse", "profile_of_layers"]

"""Predictions of a step with another way to communicate: a cost model, bounds, and a simulator."""

from ddp_hooks.planning.measurement.measure import LinkFit, Measured, fit_link, measure, measure_alone
from ddp_hooks.planning.measurement.profiling import profile_step, slowest_of
from ddp_hooks.planning.network import Costs, Network, link_of
from ddp_hooks.planning.simulation import Prediction, Strategy, simulate
from ddp_hooks.planning.step import StepProfile, TensorUse
from ddp_hooks.planning.strategies.dear import Dear, predicted_start
from ddp_hooks.planning.strategies.in_backward import Ddp, Quantized, SparDL

__all__ = [
    "Costs", "Ddp", "Dear", "LinkFit", "Measured", "Network", "Prediction", "Quantized", "SparDL", "StepProfile",
    "Strategy", "TensorUse", "fit_link", "link_of", "measure", "measure_alone", "predicted_start", "profile_step",
    "simulate", "slowest_of",
]

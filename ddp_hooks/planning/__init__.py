"""Predictions of a step with another way to communicate: a cost model, bounds, and a simulator."""

from ddp_hooks.planning.measurement.measure import LinkFit, Measured, fit_link, measure, measure_alone
from ddp_hooks.planning.measurement.profiling import profile_step, slowest_of
from ddp_hooks.planning.network import Costs, Network, link_of
from ddp_hooks.planning.simulation import Prediction, Strategy, simulate
from ddp_hooks.planning.step import StepProfile, TensorUse, profile_of_layers
from ddp_hooks.planning.strategies.all_reduce import ByteScheduler, Ddp, MgWfbp
from ddp_hooks.planning.strategies.dear import Dear, predicted_start
from ddp_hooks.planning.strategies.horovod import Horovod
from ddp_hooks.planning.strategies.sparse import SparDL
from ddp_hooks.planning.strategies.tables import EmbRace, SparseDdp, TableTraffic

__all__ = [
    "ByteScheduler", "Costs", "Ddp", "Dear", "EmbRace", "Horovod", "LinkFit", "Measured", "MgWfbp", "Network",
    "Prediction", "SparDL", "SparseDdp", "StepProfile", "Strategy", "TableTraffic", "TensorUse", "fit_link", "link_of",
    "measure", "measure_alone", "predicted_start", "profile_of_layers", "profile_step", "simulate", "slowest_of",
]

"""Collectives by name, in any order; and models of which ranks use different parts."""

from ddp_hooks.coordination.config import CoordinatorConfig
from ddp_hooks.coordination.control.request_queue import Handle
from ddp_hooks.coordination.coordinator import Coordinator
from ddp_hooks.coordination.model import CoordinatedModel, coordinate
from ddp_hooks.coordination.stats import CoordinationStats, seconds_by_name, write_trace

__all__ = [
    "CoordinatedModel",
    "CoordinationStats",
    "Coordinator",
    "CoordinatorConfig",
    "Handle",
    "coordinate",
    "seconds_by_name",
    "write_trace",
]

"""Where a search for the fusion size begins if the cost model is asked: where it predicts the fastest step.

MG-WFBP chooses its groups by such a model and keeps them (DeAR, section II-C). Here the choice is the search's first
trial, and what is measured decides.
"""

from __future__ import annotations

from dataclasses import replace

from ddp_hooks.planning.dear import Dear
from ddp_hooks.planning.network import Network
from ddp_hooks.planning.simulation import Costs, simulate
from ddp_hooks.planning.step import StepProfile
from ddp_hooks.tuning.candidates import Range
from ddp_hooks.tuning.config import BucketTuner

_ALIKE = 0.005  # part of a step
_NUM_SIZES = 24  # that are simulated; the search goes on from the best


def predicted_start(
    tuner: BucketTuner, step: StepProfile, network: Network, costs: Costs | None = None, strategy: Dear | None = None
) -> BucketTuner:
    """The same tuner, whose first trial is a size with the fastest simulated step.

    Of sizes that are as fast as simulations can tell, the one in the middle: there an error of the model costs least.

    Args:
        tuner: what may be tried; its ``start_mb`` is replaced.
        step: what a worker computes.
        network: between workers.
        costs: of a worker's processor.
        strategy: DeAR as it is configured; None: with the defaults of :class:`~ddp_hooks.DearConfig`.
    """
    dear = replace(strategy or Dear(), tuner=tuner)
    sizes = Range(tuner.low_mb, tuner.high_mb, tuner.scale)
    sizes_mb = [sizes.size_at(i / (_NUM_SIZES - 1)) for i in range(_NUM_SIZES)]
    steps_s = {mb: simulate(replace(dear, fusion_mb=mb), step, network, costs).step_s for mb in sizes_mb}
    fast = [mb for mb, step_s in steps_s.items() if step_s <= (1 + _ALIKE) * min(steps_s.values())]
    middle_mb = fast[len(fast) // 2]
    # Ends of the range may be off by a rounding error.
    return replace(tuner, start_mb=min(max(middle_mb, tuner.low_mb), tuner.high_mb))

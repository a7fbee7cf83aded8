"""Gaussian process over measured throughputs, and the expected improvement over the best (zhang2023dear, IV-B).

Imports scikit-optimize, which takes seconds: import this module off the training thread.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import skopt
from skopt.acquisition import gaussian_ei

from ddp_hooks.tuning.candidates import Observation

_FIXED_TRIALS = 3  # with fewer, their standard deviation says nothing
_FIXED_DEVIATION = 0.05  # so this part of the first throughput serves instead


@dataclass(frozen=True)
class Posterior:
    improvement: list[float]  # of each candidate, over the best by more than xi, in standard deviations of the trials
    gain: list[float]  # expected improvement over the best, as a part of it


def fit_posterior(
    positions: Sequence[Sequence[float]], observed: Sequence[Observation], xi: float, seed: int
) -> Posterior:
    """Fit a Gaussian process to the standardised throughputs at ``positions``, coordinates in [0, 1].

    scikit-optimize subtracts ``xi`` in the units of its objective. The objective is therefore standardised by mean and
    deviation of the trials so far, and fitted anew each time. Its ``ask()`` samples a continuous range, in which many
    points form the same groups; the acquisition is therefore evaluated here, for all candidates.
    """
    throughputs = np.array([observation.throughput for observation in observed])
    if len(observed) < _FIXED_TRIALS or not throughputs.std() > 0:
        unit = _FIXED_DEVIATION * throughputs[0]
    else:
        unit = throughputs.std()
    objective = (throughputs.mean() - throughputs) / unit  # to be minimised
    points = [list(map(float, position)) for position in positions]
    optimizer = skopt.Optimizer(
        [(0.0, 1.0)] * len(points[0]),
        base_estimator="GP",
        n_initial_points=1,
        acq_func="EI",
        acq_func_kwargs={"xi": xi},
        acq_optimizer="sampling",
        acq_optimizer_kwargs={"n_points": 1},  # its own proposal is not used
        random_state=seed,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about equal points, and hyper-parameters at their bounds
        optimizer.tell([points[observation.candidate] for observation in observed], objective.tolist())
        model = optimizer.models[-1]
        transformed = optimizer.space.transform(points)
    best = float(objective.min())
    improvement = gaussian_ei(transformed, model, best, xi)
    gain = gaussian_ei(transformed, model, best, 0.0) * unit / throughputs.max()
    return Posterior(improvement.tolist(), gain.tolist())

"""Picture of the measurements, the posterior and the expected improvement (zhang2023dear, Fig. 3)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ddp_hooks.tuning.candidates import Candidate, Setting
from ddp_hooks.tuning.config import BucketTuner
from ddp_hooks.tuning.profile import Trial
from ddp_hooks.tuning.search import observations, times_by_candidate


def plot_search(
    candidates: Sequence[Candidate], trials: Sequence[Trial], chosen: Setting, tuner: BucketTuner, path: str | Path
) -> None:
    """Write a picture to ``path``; its format follows the file's extension.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("the tuner's picture needs matplotlib: pip install matplotlib") from error
    from ddp_hooks.tuning.surrogate import fit_posterior

    observed = observations(times_by_candidate(candidates, trials))
    posterior = fit_posterior([candidate.position for candidate in candidates], observed, tuner.xi, tuner.seed)
    figure = Figure(figsize=(7, 5), layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=[3, 1])
    for lanes in sorted({candidate.setting.lanes for candidate in candidates}):
        members = [i for i, candidate in enumerate(candidates) if candidate.setting.lanes == lanes]
        name = f"{lanes} lane{'s' if lanes > 1 else ''}"
        sizes = [candidates[i].setting.mb for i in members]
        mean, deviation = (np.array(values)[members] for values in (posterior.mean, posterior.deviation))
        measured = [candidates[i].setting.mb for i, _ in observed if i in members]
        throughputs = [throughput for i, throughput in observed if i in members]
        (line,) = above.plot(sizes, mean, label=f"mean, {name}")
        color = line.get_color()
        above.fill_between(
            sizes, mean - 1.96 * deviation, mean + 1.96 * deviation, alpha=0.15, color=color, label="95 % confidence"
        )
        above.plot(measured, throughputs, "o", color=color, label=f"measured, {name}")
        below.plot(sizes, np.array(posterior.improvement)[members], color=color)
    above.axvline(chosen.mb, color="gray", linestyle=":", label=f"in force: {chosen}")
    above.set_ylabel("steps per second")
    above.legend(fontsize="small")
    below.set(ylabel="expected\nimprovement", xlabel="fusion size, MB", xscale="log")
    figure.savefig(path, dpi=150)

"""What was measured, what is believed, and what is expected of a further trial (zhang2023dear, Fig. 3)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from ddp_hooks.tuning.candidates import Candidate, Setting, by_candidate
from ddp_hooks.tuning.config import BucketTuner
from ddp_hooks.tuning.profile import Trial


def draw(
    candidates: Sequence[Candidate], trials: Sequence[Trial], chosen: Setting, tuner: BucketTuner, path: str | Path
) -> None:
    """Write a picture to ``path``; its format follows the name.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("the tuner's picture needs matplotlib: pip install matplotlib") from error
    from ddp_hooks.tuning.surrogate import Observation, believe

    steps_s = by_candidate(candidates, ((trial.setting, trial.step_s) for trial in trials))
    observed = [Observation(index, 1 / statistics.median(values)) for index, values in steps_s.items()]
    belief = believe([candidate.position for candidate in candidates], observed, tuner.xi, tuner.seed)

    figure = Figure(figsize=(7, 5), layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=[3, 1])
    for lanes in sorted({candidate.setting.lanes for candidate in candidates}):
        members = [i for i, candidate in enumerate(candidates) if candidate.setting.lanes == lanes]
        name = f"{lanes} lane{'s' if lanes > 1 else ''}"
        sizes = [candidates[i].setting.mb for i in members]
        mean = [belief.mean[i] for i in members]
        margin = [1.96 * belief.deviation[i] for i in members]
        (line,) = above.plot(sizes, mean, label=f"mean, {name}")
        low = [m - d for m, d in zip(mean, margin, strict=True)]
        high = [m + d for m, d in zip(mean, margin, strict=True)]
        above.fill_between(sizes, low, high, alpha=0.15, color=line.get_color(), label="95 % confidence")
        measured = [observation for observation in observed if observation.candidate in members]
        above.plot(
            [candidates[observation.candidate].setting.mb for observation in measured],
            [observation.throughput for observation in measured],
            "o",
            color=line.get_color(),
            label=f"measured, {name}",
        )
        below.plot(sizes, [belief.improvement[i] for i in members], color=line.get_color())
    above.axvline(chosen.mb, color="gray", linestyle=":", label=f"in force: {chosen}")
    above.set_ylabel("steps per second")
    above.legend(fontsize="small")
    below.set_ylabel("expected\nimprovement")
    below.set_xlabel("fusion size, MB")
    if tuner.scale == "log":
        below.set_xscale("log")
    figure.savefig(path, dpi=150)

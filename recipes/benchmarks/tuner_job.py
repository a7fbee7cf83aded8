"""What the workers of the tuner's benchmark are asked to do."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from recipes.benchmarks.workloads import Workload


@dataclass(frozen=True)
class TunerJob:
    """One workload under DeAR: a live search, then every size of a grid and what was found, alternating.

    Args:
        workload: the model.
        slow: factor on its computing time.
        bucket_mb: of DDP.
        steps_per_trial: of the search.
        sizes_mb: the grid.
        rounds: how often every size of it is measured.
        timed_steps: steps each time, after one that does not count.
    """

    workload: Workload
    slow: float
    bucket_mb: float
    steps_per_trial: int
    max_trials: int
    sizes_mb: tuple[float, ...]
    rounds: int
    timed_steps: int
    result_path: str = ""  # set by the launcher
    rendezvous: str = "env://"

    @property
    def name(self) -> str:
        return self.workload.name

    def save(self, path: Path) -> None:
        path.write_text(json.dumps({**asdict(self), "workload": self.workload.to_json()}))

    @classmethod
    def load(cls, path: Path) -> TunerJob:
        data = json.loads(path.read_text())
        workload = Workload.from_json(data["workload"])
        return cls(**{**data, "workload": workload, "sizes_mb": tuple(data["sizes_mb"])})

"""What one set of workers is asked to do, as a file that the parent writes and every worker reads.

The parent reads shapes from torchvision and transformers; workers need only torch, and so start in a third of
the time.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from recipes.benchmarks.workloads import Workload


@dataclass(frozen=True)
class Job:
    """All variants of one workload on one network, or with `memory` the peak memory of one variant."""

    workload: Workload
    slow: float
    variants: tuple[str, ...]
    result_path: str = ""  # set by the launcher
    rounds: int = 3
    warmup_steps: int = 3  # DDP rebuilds its buckets after the first
    timed_steps: int = 5
    dear_settings: dict[str, Any] = field(default_factory=dict)
    memory: bool = False
    rendezvous: str = "env://"

    @property
    def name(self) -> str:
        return self.workload.name

    def save(self, path: Path) -> None:
        path.write_text(json.dumps({**asdict(self), "workload": self.workload.to_json()}))

    @classmethod
    def load(cls, path: Path) -> Job:
        data = json.loads(path.read_text())
        workload, variants = Workload.from_json(data["workload"]), tuple(data["variants"])
        return cls(**{**data, "workload": workload, "variants": variants})

"""What one set of workers is asked to do, as a file that the parent writes and every worker reads.

The parent reads shapes from torchvision and transformers; workers need only torch, and so start in a third of
the time.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import Self

from recipes.benchmarks.workloads import Workload


class WorkloadJob:
    """What jobs of one workload share: its name is theirs, and they are files that workers read."""

    workload: Any
    workload_type: ClassVar[type[Any]] = Workload

    @property
    def name(self) -> str:
        name: str = self.workload.name
        return name

    def save(self: Any, path: Path) -> None:
        path.write_text(json.dumps({**asdict(self), "workload": self.workload.to_json()}))

    @classmethod
    def load(cls, path: Path) -> Self:
        data = json.loads(path.read_text())
        lists = {key: tuple(value) for key, value in data.items() if isinstance(value, list)}
        return cls(**{**data, **lists, "workload": cls.workload_type.from_json(data["workload"])})


@dataclass(frozen=True)
class Job(WorkloadJob):
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
    foreach: bool | None = None  # of the optimizer: all parameters at once, or, by default on CPUs, one by one
    rendezvous: str = "env://"

"""What the workers of the sparse all-reduce benchmark are asked to do."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

DENSE = ("all-reduce", "bf16", "powersgd-4", "dense")
SPARSE = ("spardl", "topka", "topkdsa", "gtopk", "oktopk")


@dataclass(frozen=True)
class SparseJob:
    """All variants on one network.

    Args:
        variants: names of :data:`DENSE` and :data:`SPARSE`.
        numels: lengths of the gradient, float32.
        densities: for the sparse variants.
        wire: format of their entries.
        rounds: timed runs of each variant; one more comes before.
    """

    variants: tuple[str, ...]
    numels: tuple[int, ...]
    densities: tuple[float, ...]
    wire: str = "compact"
    rounds: int = 3
    result_path: str = ""  # set by the launcher
    rendezvous: str = "env://"

    @property
    def name(self) -> str:
        return "sparse all-reduce"

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> SparseJob:
        data = json.loads(path.read_text())
        lists = {key: tuple(value) for key, value in data.items() if isinstance(value, list)}
        return cls(**{**data, **lists})

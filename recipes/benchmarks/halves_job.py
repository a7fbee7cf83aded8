"""What the workers that time all-reduces and their halves are asked to do."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

KINDS = ("all-reduce", "rsag", "reduce-scatter", "all-gather")


@dataclass(frozen=True)
class HalvesJob:
    """All kinds for all sizes, alternating.

    Args:
        sizes: bytes of the gradient, float32.
        rounds: timed runs of each; one more comes before.
    """

    sizes: tuple[int, ...]
    rounds: int = 9
    result_path: str = ""  # set by the launcher
    rendezvous: str = "env://"

    @property
    def name(self) -> str:
        return "an all-reduce in halves"

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> HalvesJob:
        data = json.loads(path.read_text())
        return cls(**{**data, "sizes": tuple(data["sizes"])})

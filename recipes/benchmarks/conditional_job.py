"""What the workers of the benchmark of conditional networks are asked to do."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeAlias

Choice: TypeAlias = Literal["step", "rank"]
VARIANTS = ("ddp-5mb", "ddp-25mb", "coordinated")


@dataclass(frozen=True)
class ConditionalJob:
    """A network of a trunk and branches, of which each step uses some, in several ways, in turns.

    Args:
        variants: of :data:`VARIANTS`.
        choice: who draws the branches: all ranks the same in a step, or every rank its own.
        num_branches: that the network has.
        num_used: of them in a step, by each rank.
        hidden: size of the layers; a branch and the trunk have four of them each.
        compute_s: seconds that the forward and backward of the trunk or of a branch sleep.
        rounds: windows per variant.
        warmup_steps, timed_steps: of a window.
    """

    variants: tuple[str, ...]
    choice: Choice
    num_branches: int = 8
    num_used: int = 2
    hidden: int = 1024
    compute_s: float = 0.05
    rounds: int = 3
    warmup_steps: int = 8
    timed_steps: int = 10
    result_path: str = ""  # set by the launcher
    rendezvous: str = "env://"

    @property
    def name(self) -> str:
        return "a conditional network"

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> ConditionalJob:
        data = json.loads(path.read_text())
        return cls(**{**data, "variants": tuple(data["variants"])})

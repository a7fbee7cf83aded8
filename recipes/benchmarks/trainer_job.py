"""What the workers of the Trainers' benchmark are asked to do."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ddp_hooks import DearConfig, TopKConfig

# What the Trainer is told, and the hook that is attached to it.
VARIANTS: dict[str, tuple[dict[str, Any], DearConfig | TopKConfig | None]] = {
    "plain": ({}, None),
    "plain, no search for unused": ({"ddp_find_unused_parameters": False}, None),
    "plain, 5 MB buckets": ({"ddp_find_unused_parameters": False, "ddp_bucket_cap_mb": 5}, None),
    "dear": ({}, DearConfig()),
    "topk": ({}, TopKConfig(density=0.01)),
}


@dataclass(frozen=True)
class TrainerJob:
    """A GPT-2 in several Trainers, in turns."""

    variants: tuple[str, ...]
    layers: int
    hidden: int
    tokens: int  # per worker and step
    rounds: int = 2
    warmup_steps: int = 4
    timed_steps: int = 8
    result_path: str = ""  # set by the launcher
    rendezvous: str = "env://"

    @property
    def name(self) -> str:
        return "GPT-2 in a Trainer"

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> TrainerJob:
        data = json.loads(path.read_text())
        return cls(**{**data, "variants": tuple(data["variants"])})

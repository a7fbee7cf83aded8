"""What the workers of the time-to-loss benchmark are asked to do."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

MODELS = ("vgg16", "gpt2", "tiny")


@dataclass(frozen=True)
class LossVariant:
    """A variant's name, taken apart: `ddp-25mb`, or `spardl-0.01` with a density."""

    hook: str  # "ddp" or an algorithm of TopKConfig
    value: float


def parse(name: str) -> LossVariant:
    """The variant called `name`."""
    match = re.fullmatch(r"ddp-(\d+(?:\.\d+)?)mb|(spardl|topka|topkdsa|gtopk|oktopk|auto)-(\d?\.\d+)", name)
    if match is None:
        raise ValueError(f"variant must read ddp-<size>mb or <algorithm>-<density>, such as spardl-0.01, got {name!r}")
    return LossVariant("ddp", float(match[1])) if match[1] else LossVariant(match[2], float(match[3]))


@dataclass(frozen=True)
class LossJob:
    """One model, trained by every variant from the same weights on the same batches.

    Args:
        model: of :data:`MODELS`.
        variants: plain DDP ones, of which the fastest one is trained to the end, and sparse ones.
        steps: of the dense run; its loss then is what the others are to reach.
        patience: sparse runs may take this many times as many.
        trial_steps: of every plain DDP variant, to find the fastest.
        warmup_steps: of sparse variants, in which the density falls.
        window: steps over which losses are averaged.
    """

    model: str
    variants: tuple[str, ...]
    steps: int
    patience: float = 1.5
    trial_steps: int = 6
    warmup_steps: int = 0
    window: int = 20
    seed: int = 0
    result_path: str = ""  # set by the launcher
    rendezvous: str = "env://"

    @property
    def name(self) -> str:
        return f"time to loss of {self.model}"

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> LossJob:
        data = json.loads(path.read_text())
        return cls(**{**data, "variants": tuple(data["variants"])})

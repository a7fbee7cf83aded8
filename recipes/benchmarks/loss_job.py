"""What the workers of the time-to-loss benchmark are asked to do."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

DENSE = ("ddp-5mb", "ddp-25mb", "ddp-64mb")
DEFAULT_VARIANTS = {
    # Nine tenths of VGG-16 are its linear layers; the convolutions learn sooner from full gradients. Its optimizer has
    # momentum: summed up before the selection, it needs as many steps as dense training; after it, a third more.
    "vgg16": (*DENSE, "topk:density=0.01,momentum=0.9,dense_below_numel=3000000"),
    "gpt2": (*DENSE, "topk:density=0.01"),
    "tiny": ("ddp-25mb", "topk:density=0.05"),
}
MODELS = tuple(DEFAULT_VARIANTS)


@dataclass(frozen=True)
class LossJob:
    """One model, trained by every variant from the same weights on the same batches.

    Args:
        model: of :data:`MODELS`.
        variants: plain DDP ones, of which the fastest one is trained to the end, and others.
        steps: of that run; its loss then is what the others are to reach.
        patience: the others may take this many times as many.
        trial_steps: of every plain DDP variant, to find the fastest.
        window: steps over which losses are averaged.
    """

    model: str
    variants: tuple[str, ...]
    steps: int
    patience: float = 1.5
    trial_steps: int = 6
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

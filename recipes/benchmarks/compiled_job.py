"""What the workers of the benchmark of compiled models are asked to do."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class CompiledVariant:
    """A variant's name, taken apart."""

    hook: str  # "ddp" or "dear"
    bucket_mb: float
    what: str  # is compiled: "whole", "blocks" or "eager"


def parse(name: str) -> CompiledVariant:
    """The variant called `name`."""
    match = re.fullmatch(r"(ddp|dear)-(\d+(?:\.\d+)?)mb:(whole|blocks|eager)", name)
    if match is None:
        raise ValueError(f"variant must read ddp-<size>mb:whole|blocks|eager or dear-<size>mb:…, got {name!r}")
    return CompiledVariant(match[1], float(match[2]), match[3])


@dataclass(frozen=True)
class CompiledJob:
    """All variants of one model on one network."""

    variants: tuple[str, ...]
    layers: int
    hidden: int
    tokens: int  # per worker and step
    backend: str
    rounds: int = 2
    warmup_steps: int = 4  # graphs are compiled in the first ones
    timed_steps: int = 5
    result_path: str = ""  # set by the launcher
    rendezvous: str = "env://"

    @property
    def name(self) -> str:
        return "compiled BERT"

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> CompiledJob:
        data = json.loads(path.read_text())
        return cls(**{**data, "variants": tuple(data["variants"])})

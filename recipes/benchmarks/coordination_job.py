"""What the workers of the benchmark of coordination are asked to do."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeAlias

VARIANTS = ("coordinator", "hierarchical", "bitvector", "verified")
Pattern: TypeAlias = Literal["burst", "spread"]


@dataclass(frozen=True)
class ControlJob:
    """Many small tensors per step, agreed upon in several ways, in turns.

    Args:
        variants: of :data:`VARIANTS`.
        patterns: whether a step asks for all tensors at once, or one after the other during a backward.
        num_tensors: of a step.
        numel: of each tensor.
        step_s: seconds of a step that computes; a third of them forward, the rest backward, all of it slept.
        num_buckets: of the verified schedule.
        rounds: windows per variant and pattern.
        warmup_steps, timed_steps: of a window.
    """

    variants: tuple[str, ...] = VARIANTS
    patterns: tuple[Pattern, ...] = ("burst", "spread")
    num_tensors: int = 160  # about as many as a ResNet-50 has
    numel: int = 16
    step_s: float = 0.1
    num_buckets: int = 8
    rounds: int = 3
    warmup_steps: int = 2
    timed_steps: int = 10
    result_path: str = ""  # set by the launcher
    rendezvous: str = "env://"

    @property
    def name(self) -> str:
        return "agreements"

    def save(self, path: Path) -> None:
        path.write_text(json.dumps({"control": asdict(self)}))


@dataclass(frozen=True)
class GroupingJob:
    """The gradients of a model, all-reduced in groups of equal numbers of tensors, in turns.

    Args:
        tensors: in the order of the backward: name, elements, and seconds of the backward before it is there.
        forward_s: seconds before the backward.
        groups: numbers of groups; 0: tensors are asked for one by one.
        rounds: windows per number of groups.
        warmup_steps, timed_steps: of a window.
    """

    tensors: tuple[tuple[str, int, float], ...]
    forward_s: float
    groups: tuple[int, ...]
    rounds: int = 3
    warmup_steps: int = 1
    timed_steps: int = 3
    result_path: str = ""  # set by the launcher
    rendezvous: str = "env://"

    @property
    def name(self) -> str:
        return "groups"

    def save(self, path: Path) -> None:
        path.write_text(json.dumps({"grouping": asdict(self)}))


def load(path: Path) -> ControlJob | GroupingJob:
    """What either of them has saved."""
    ((kind, data),) = json.loads(path.read_text()).items()
    if kind == "control":
        return ControlJob(**{**data, **{name: tuple(data[name]) for name in ("variants", "patterns")}})
    tensors = tuple(tuple(each) for each in data["tensors"])
    return GroupingJob(**{**data, "tensors": tensors, "groups": tuple(data["groups"])})

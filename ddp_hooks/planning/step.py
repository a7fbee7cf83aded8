"""What one training step computes, and when it needs and makes what travels: all that schedules depend on."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class TensorUse:
    """A parameter tensor, and when a step without communication reads it and has its gradient.

    Args:
        name: for messages and pictures.
        num_bytes: of the gradient, and of the parameter.
        needed_s: seconds of the forward before the tensor is read for the first time.
        ready_s: seconds of the backward before its gradient is complete.
    """

    name: str
    num_bytes: int
    needed_s: float
    ready_s: float


@dataclass(frozen=True)
class StepProfile:
    """One step of one worker, with no communication.

    Args:
        tensors: those that are trained, in any order. What is read twice (tied) is here once.
        forward_s, backward_s: seconds of computing.
        optimizer_s: seconds of ``optimizer.step()``, for whole parameters.
        other_s: seconds of the loop that are none of these, such as loading data.
        cpu_s: seconds for which a processor core was at forward, backward and the rest; 0: an accelerator was, or
            nobody knows.
        optimizer_cpu_s: the same of ``optimizer.step()``.
        element_bytes: of one number of a gradient.
    """

    tensors: tuple[TensorUse, ...]
    forward_s: float
    backward_s: float
    optimizer_s: float = 0.0
    other_s: float = 0.0
    cpu_s: float = 0.0
    optimizer_cpu_s: float = 0.0
    element_bytes: int = 4

    def __post_init__(self) -> None:
        for name in ("forward_s", "backward_s", "optimizer_s", "other_s", "cpu_s", "optimizer_cpu_s"):
            if not (getattr(self, name) >= 0 and math.isfinite(getattr(self, name))):
                raise ValueError(f"{name} must be >= 0 seconds, got {getattr(self, name)}")
        for tensor in self.tensors:
            if not 0 <= tensor.needed_s <= self.forward_s * (1 + 1e-9):
                raise ValueError(f"{tensor.name} is read {tensor.needed_s} s into a forward of {self.forward_s} s")
            if not 0 <= tensor.ready_s <= self.backward_s * (1 + 1e-9):
                raise ValueError(f"{tensor.name} is ready {tensor.ready_s} s into a backward of {self.backward_s} s")

    @property
    def compute_s(self) -> float:
        """Seconds of forward and backward."""
        return self.forward_s + self.backward_s

    @property
    def num_bytes(self) -> int:
        """Of all gradients."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def cpu_share(self) -> float:
        """Part of the time, but for the optimizer's, for which the training thread keeps a core busy."""
        whole_s = self.compute_s + self.other_s
        return min(1.0, self.cpu_s / whole_s) if whole_s else 0.0

    @cached_property
    def backward_order(self) -> tuple[int, ...]:
        """Indices of the tensors as the backward completes their gradients; where that is at once, the last first."""
        return tuple(sorted(range(len(self.tensors)), key=lambda i: (self.tensors[i].ready_s, -i)))

    @cached_property
    def forward_order(self) -> tuple[int, ...]:
        """Indices of the tensors as the forward reads them."""
        return tuple(sorted(range(len(self.tensors)), key=lambda i: (self.tensors[i].needed_s, i)))

    def scaled(self, factor: float) -> StepProfile:
        """The same step where forward and backward take ``factor`` times as long."""
        tensors = (
            TensorUse(tensor.name, tensor.num_bytes, tensor.needed_s * factor, tensor.ready_s * factor)
            for tensor in self.tensors
        )
        return replace(
            self, tensors=tuple(tensors), forward_s=self.forward_s * factor, backward_s=self.backward_s * factor
        )

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        Path(path).write_text(json.dumps(self.to_json()))

    def to_json(self) -> dict[str, Any]:
        """What :meth:`from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> StepProfile:
        """What :meth:`to_json` has written."""
        return cls(**{**data, "tensors": tuple(TensorUse(**tensor) for tensor in data["tensors"])})


def profile_of_layers(
    layers: Sequence[tuple[float, float, Sequence[int]]],
    names: Sequence[str],
    tensor_bytes: Sequence[int],
    optimizer_s: float = 0.0,
) -> StepProfile:
    """The step of layers that run one after the other, and backwards in reverse.

    Args:
        layers: of each its forward and backward seconds, and the tensors that it reads, in the order of the forward. A
            tied tensor appears in several: its gradient is complete when that of the first one is.
        names, tensor_bytes: of the tensors.

    Raises:
        ValueError: a tensor is read by no layer.
    """
    forward_s, backward_s = sum(layer[0] for layer in layers), sum(layer[1] for layer in layers)
    uses: dict[int, TensorUse] = {}
    before_s, after_s = 0.0, backward_s
    for layer_forward_s, layer_backward_s, tensors in layers:
        for tensor in tensors:
            uses.setdefault(tensor, TensorUse(names[tensor], tensor_bytes[tensor], before_s, max(0.0, after_s)))
        before_s = min(forward_s, before_s + layer_forward_s)
        after_s -= layer_backward_s
    if len(uses) < len(names):
        unread = min(set(range(len(names))) - set(uses))
        raise ValueError(f"{names[unread]} is read by no layer; drop it or name its reader")
    return StepProfile(tuple(uses[i] for i in range(len(names))), forward_s, backward_s, optimizer_s)

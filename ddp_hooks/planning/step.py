"""Profile of a training step: its computation, and when it reads parameters and has gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class TensorUse:
    """A parameter, and when a step without communication reads it and has its gradient."""

    name: str
    num_bytes: int  #: size of the gradient, and of the parameter
    needed_s: float  #: from the begin of the forward to the first read
    ready_s: float  #: from the begin of the backward until the gradient is ready


@dataclass(frozen=True)
class StepProfile:
    """One step of one worker, without communication."""

    tensors: tuple[TensorUse, ...]  #: trained parameters, in any order; a tied parameter is here once
    forward_s: float
    backward_s: float
    optimizer_s: float = 0.0  #: ``optimizer.step()``, for whole parameters
    other_s: float = 0.0  #: other seconds of the loop, such as loading data
    #: Seconds in which the training thread kept a core busy, without ``optimizer.step()``; 0 if unknown, or if
    #: an accelerator computed.
    cpu_s: float = 0.0
    optimizer_cpu_s: float = 0.0  #: the same in ``optimizer.step()``
    element_bytes: int = 4  #: size of one element of a gradient

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
        return self.forward_s + self.backward_s

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def cpu_share(self) -> float:
        """Part of the step without its optimizer in which the training thread keeps a core busy."""
        whole_s = self.compute_s + self.other_s
        return min(1.0, self.cpu_s / whole_s) if whole_s else 0.0

    @cached_property
    def backward_order(self) -> tuple[int, ...]:
        """Indices of the tensors in the order of their gradients; of equal ones, the last first."""
        return tuple(sorted(range(len(self.tensors)), key=lambda i: (self.tensors[i].ready_s, -i)))

    @cached_property
    def forward_order(self) -> tuple[int, ...]:
        """Indices of the tensors in the order in which the forward reads them."""
        return tuple(sorted(range(len(self.tensors)), key=lambda i: (self.tensors[i].needed_s, i)))

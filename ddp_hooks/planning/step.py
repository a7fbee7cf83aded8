"""Profile of a training step: its computation, and when it reads parameters and has gradients; and a lower bound."""

from __future__ import annotations

import heapq
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
    #: Bytes of its gradient that travel by ``DearConfig(wire="exact")``, per byte: 0.5 where all numbers fit 16 bits.
    exact_width: float = 1.0
    is_cast: bool = False  #: autocast reads it in bfloat16, and nothing reads it whole, as far as its gradient tells


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
    def exact_width(self) -> float:
        """Mean of the tensors' ``exact_width``, by bytes."""
        return sum(tensor.num_bytes * tensor.exact_width for tensor in self.tensors) / max(1, self.num_bytes)

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


def collective_s(num_bytes: float, workers: int, bytes_per_s: float) -> float:
    """Return the seconds of a bandwidth-optimal reduce-scatter, or all-gather, of `num_bytes` without latency.

    Every worker sends, and receives, (P-1)/P of the bytes. The DeAR paper (Eq. 5) drops the factor, P being 64.
    """
    return (workers - 1) / workers * num_bytes / bytes_per_s


def dependency_bound_s(
    step: StepProfile, workers: int, bytes_per_s: float, *, gathers_wait_for_step: bool = False
) -> float:
    """Return the seconds per step of the best possible schedule on an ideal link, respecting every dependency.

    The link is one server at `bytes_per_s` in each direction, without latency, framing or cost of issuing work. Every
    reduce-scatter and every gather moves (P-1)/P of its tensor and may be interrupted at any byte. The optimizer takes
    no time. Dependencies: gradient -> reduce-scatter -> gather -> forward of the layer. With `gathers_wait_for_step`
    also: all reduce-scatters -> first gather, since `optimizer.step()` is one call. Without it gathers may start in the
    backward, and the result can be below Eq. 7 of the DeAR paper.

    Gathers end within the forward that needs them, so steps do not interact. A step ends at the largest
    `gather end + forward time from that layer on`. This is scheduling on one machine with release times and precedence,
    minimising the maximum lateness; pre-emptive earliest-due-date-first solves it exactly.
    """
    release_s = [tensor.ready_s for tensor in step.tensors]
    transfers_s = [collective_s(tensor.num_bytes, workers, bytes_per_s) for tensor in step.tensors]
    due_s = [tensor.needed_s - step.forward_s for tensor in step.tensors]  # of gathers, from the end of the forward
    arrivals = step.backward_order
    ready: list[tuple[float, int, bool, float]] = []  # (due, tensor, is_gather, seconds left)
    held: list[tuple[float, int, bool, float]] = []  # gathers that wait for step()
    end_s = step.compute_s
    scatters_left = len(arrivals)
    now_s = 0.0
    position = 0
    while position < len(arrivals) or ready:
        if not ready:
            now_s = max(now_s, release_s[arrivals[position]])
        while position < len(arrivals) and release_s[arrivals[position]] <= now_s:
            tensor = arrivals[position]
            # A reduce-scatter is due one gather before its gather.
            heapq.heappush(ready, (due_s[tensor] - transfers_s[tensor], tensor, False, transfers_s[tensor]))
            position += 1
        due, tensor, is_gather, left_s = heapq.heappop(ready)
        next_arrival_s = release_s[arrivals[position]] if position < len(arrivals) else float("inf")
        if now_s + left_s > next_arrival_s:  # interrupted: the arrival may be more urgent
            heapq.heappush(ready, (due, tensor, is_gather, left_s - (next_arrival_s - now_s)))
            now_s = next_arrival_s
            continue
        now_s += left_s
        if is_gather:
            end_s = max(end_s, now_s - due_s[tensor])
            continue
        scatters_left -= 1
        held.append((due_s[tensor], tensor, True, transfers_s[tensor]))
        if not gathers_wait_for_step or scatters_left == 0:
            for gather in held:
                heapq.heappush(ready, gather)
            held.clear()
    return end_s

"""Copies of one network in training: with plain DDP, with DeAR, and without communication."""
# No `from __future__ import annotations`: DDP compares the annotation of a hook's bucket.

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from ddp_hooks import DearConfig, DearState, Span, dear_hook


class Reading(NamedTuple):
    """Meters of this process at one moment."""

    time_s: float
    sent_bytes: float  # by this worker, headers included


@dataclass
class Variant:
    """One copy of the network, and measurements of its training.

    Args:
        network, model: the copy, and DDP around it, which the loop calls.
        communication: returns spans of what travelled, and of waits for it.
        after_step: called when a step has ended.
        wait: for communication that a step may have left under way.
        close: ends background work.
    """

    name: str
    network: nn.Module
    model: nn.Module
    optimizer: torch.optim.Optimizer
    communication: Callable[[], list[Span]] = list
    after_step: Callable[[], object] = lambda: None
    wait: Callable[[], None] = lambda: None
    close: Callable[[], None] = lambda: None
    spans: list[Span] = field(default_factory=list)  # of the training loop
    segments: list[list[Reading]] = field(default_factory=list)  # per segment, the meters at the end of each step

    def step(self, inputs: Tensor, labels: Tensor) -> float:
        """Make a training step; return the loss."""
        self.optimizer.zero_grad()
        with self._span("forward"):
            loss = F.cross_entropy(self.model(inputs), labels)
        with self._span("backward"):
            loss.backward()
        with self._span("optimizer"):
            self.optimizer.step()
        self.after_step()
        return loss.item()

    @contextmanager
    def _span(self, name: str) -> Iterator[None]:
        start_s = time.perf_counter()
        yield
        self.spans.append(Span(name, name, start_s, time.perf_counter()))


def build_plain(network: nn.Module) -> Variant:
    ddp = DistributedDataParallel(network, gradient_as_bucket_view=True)
    travelled: list[Span] = []
    ddp.register_comm_hook(travelled, recorded_all_reduce)
    variant = Variant("plain DDP", network, ddp, SGD(network.parameters(), lr=0.01, momentum=0.9))
    variant.communication = lambda: travelled + waits_for_all_reduce(travelled, variant.spans)
    return variant


def build_dear(network: nn.Module) -> Variant:
    ddp = DistributedDataParallel(network, bucket_cap_mb=5, gradient_as_bucket_view=True)
    optimizer = SGD(network.parameters(), lr=0.01, momentum=0.9)
    state = DearState(ddp, optimizer, DearConfig(trace=True))
    ddp.register_comm_hook(state, dear_hook)
    return Variant("DeAR", network, ddp, optimizer, state.timeline, wait=state.synchronize, close=state.close)


def build_alone(network: nn.Module) -> Variant:
    # A barrier per step: synchronous training waits for its slowest worker, however fast the network.
    optimizer = SGD(network.parameters(), lr=0.01, momentum=0.9)
    return Variant("no communication", network, network, optimizer, after_step=dist.barrier)


def recorded_all_reduce(travelled: list[Span], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Do as DDP does without a hook, and note the time."""
    start_s, name = time.perf_counter(), f"all-reduce of bucket {bucket.index()}"
    reduction = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    assert reduction is not None  # None is for ranks outside the group

    def note_end(reduced: torch.futures.Future[list[Tensor]]) -> Tensor:
        travelled.append(Span("all-reduce", name, start_s, time.perf_counter()))
        return reduced.value()[0]

    return reduction.get_future().then(note_end)


def waits_for_all_reduce(travelled: Sequence[Span], loop_spans: Sequence[Span]) -> list[Span]:
    """Return the waits of backward: it computes until it hands over its last bucket, and waits from then on."""
    starts_s = [span.start_s for span in travelled]
    return [
        Span("wait", "backward waits for all-reduce", max(handed_over), backward.end_s)
        for backward in loop_spans
        if backward.name == "backward"
        and (handed_over := [start_s for start_s in starts_s if backward.start_s <= start_s <= backward.end_s])
    ]

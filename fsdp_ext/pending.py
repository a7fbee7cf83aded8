"""Reduce-scatters that are under way while the backward goes on, and their results' delivery."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ddp_hooks.comm import Recorder, Stall, Work, compat


class Earlier(NamedTuple):
    """A gradient that is to be added to; taken away from its parameter until there is something to add."""

    parameter: Tensor
    gradient: Tensor

    def add_up(self, output: Tensor) -> None:
        """Give it back, and add what has come, unless the parameter's gradient is no longer a part of ``output``."""
        come = self.parameter.grad
        if come is not None and _local(come).untyped_storage().data_ptr() == output.untyped_storage().data_ptr():
            _local(self.gradient).add_(_local(come))
            self.parameter.grad = self.gradient


class Delivery(NamedTuple):
    """The mean of the gradients is in ``source`` when ``work`` is complete, and wanted in ``output``."""

    work: Work
    source: Tensor  # (numel,), this rank's range of the memory that the ring adds in
    output: Tensor  # (numel,), which FSDP2 made the sharded gradients of
    nbytes: int  # of the memory that is kept for it
    earlier: tuple[Earlier, ...] = ()

    def complete(self) -> None:
        """Wait, copy, and add."""
        self.work.wait()
        self.output.copy_(self.source)
        for each in self.earlier:
            each.add_up(self.output)


class PendingReductions:
    """Delivers at the latest when the backward ends that each of them was submitted in.

    FSDP2 makes the sharded gradients of memory that is not filled yet. Until it is, it holds NaN: who reads a gradient
    too early, in a hook inside of the backward, shall see it. Gradients that were there before are taken away, so that
    FSDP2 does not add NaN to them, and added to in the order of deliveries.
    """

    def __init__(self, limit_bytes: int | None, stall: Stall, recorder: Recorder) -> None:
        self._limit_bytes = limit_bytes
        self._stall = stall
        self._recorder = recorder
        self._deliveries: deque[Delivery] = deque()
        self._nbytes = 0
        self._expected_by: int | None = None  # the backward at whose end they are delivered

    def __len__(self) -> int:
        return len(self._deliveries)

    @torch.no_grad()
    def defer(self, delivery: Delivery) -> None:
        """Deliver it later; only inside of a backward."""
        backward = torch._C._current_graph_task_id()
        if self._expected_by != backward:
            self._expected_by = backward
            compat.queue_engine_callback(self.deliver)
        while self._deliveries and self._deliveries[0].work.done:
            self._deliver_oldest()
        # Never this one: FSDP2 has yet to make gradients of its output.
        delivery.output.fill_(torch.nan)
        self._deliveries.append(delivery)
        self._nbytes += delivery.nbytes
        while self._limit_bytes is not None and self._nbytes > self._limit_bytes and len(self._deliveries) > 1:
            self._deliver_oldest()

    def deliver(self) -> None:
        """Wait for all of them."""
        self._expected_by = None
        while self._deliveries:
            self._deliver_oldest()

    @torch.no_grad()
    def _deliver_oldest(self) -> None:
        delivery = self._deliveries.popleft()
        self._nbytes -= delivery.nbytes
        with self._stall.measure(self._recorder, delivery.work.label):
            delivery.complete()


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient

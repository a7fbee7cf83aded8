"""Reduce-scatters that are under way while the backward goes on, and their results' delivery."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ddp_hooks.comm import LaneError, Recorder, Stall, Work, compat, see


class Earlier(NamedTuple):
    """A gradient that is to be added to; taken away from its parameter until there is something to add."""

    parameter: Tensor
    gradient: Tensor

    def give_back(self, output: Tensor, add: bool) -> None:
        """Make it the parameter's gradient again, unless that is no part of ``output`` any more; ``add`` what has come.
        """
        come = self.parameter.grad
        if come is not None and _memory(_local(come)) == _memory(output):
            if add:
                _local(self.gradient).add_(_local(come))
            self.parameter.grad = self.gradient


class Delivery(NamedTuple):
    """What is in ``source`` when ``work`` is complete is, divided, the mean of the gradients, wanted in ``output``."""

    work: Work
    source: Tensor  # (numel,), this rank's range of the memory in which sums are formed
    output: Tensor  # (numel,), which FSDP2 made the sharded gradients of
    nbytes: int  # of the memory that is kept for it
    owner: object = None  # whose gradients these are
    earlier: tuple[Earlier, ...] = ()
    parameters: tuple[Tensor, ...] = ()  # that may have gradients in the output
    divisor: float | None = None  # of what is summed, not averaged

    def wait(self) -> None:
        """Until the mean is in the source; once."""
        self.work.wait()
        if self.divisor is not None:
            self.source.div_(self.divisor)

    def complete(self) -> None:
        """Wait, copy, and add."""
        self.wait()
        self.output.copy_(self.source)
        for each in self.earlier:
            each.give_back(self.output, add=True)

    def was_changed_since(self, version: int) -> bool:
        """Whether somebody has written to the gradients, when the output was of this version last.

        What is done to a DTensor does not count for the tensor that it holds; FSDP2 has just made these.
        """
        if self.output._version != version:
            return True
        gradients = (parameter.grad for parameter in self.parameters)
        changed = (gradient for gradient in gradients if isinstance(gradient, DTensor) and gradient._version)
        return any(_memory(_local(gradient)) == _memory(self.output) for gradient in changed)

    def end_late(self, failed: bool) -> None:
        """After a backward that did not come to its end, for every gradient that nobody has written to since.

        It is still NaN then; others are zeros, say. One that has ``failed`` leaves the gradients of before, or none.
        """
        earlier = {id(each.parameter): each for each in self.earlier}
        for parameter in (*self.parameters, *(each.parameter for each in self.earlier)):
            come = None if parameter.grad is None else _local(parameter.grad)
            if come is None or _memory(come) != _memory(self.output) or not come.isnan().all():
                continue
            if not failed:
                place = self.source.storage_offset() + come.storage_offset() - self.output.storage_offset()
                come.copy_(self.source.as_strided(come.shape, come.stride(), place))
            if id(parameter) in earlier:
                earlier[id(parameter)].give_back(self.output, add=not failed)
            elif failed:
                parameter.grad = None


class _Pending(NamedTuple):
    delivery: Delivery
    version: int  # of the output, when it became NaN


class PendingReductions:
    """Delivers at the latest when the backward ends that each of them was submitted in.

    FSDP2 makes the sharded gradients of memory that is not filled yet. Until it is, it holds NaN: who reads a gradient
    too early, in a hook inside of the backward, shall see it, and who changes one gets an error. Gradients that were
    there before are taken away, so that FSDP2 does not add NaN to them, and added to in the order of deliveries.
    """

    def __init__(self, limit_bytes: int | None, stall: Stall, recorder: Recorder) -> None:
        self._limit_bytes = limit_bytes
        self._stall = stall
        self._recorder = recorder
        self._waiting: deque[_Pending] = deque()
        self._nbytes = 0
        self._expected_by: int | None = None  # the backward at whose end they are delivered

    def __len__(self) -> int:
        return len(self._waiting)

    @torch.no_grad()
    def make_way(self, owner: object) -> None:
        """Before gradients of ``owner`` are looked at: deliver what comes of earlier ones, and of a dead backward."""
        if self._expected_by != torch._C._current_graph_task_id() and not compat.inside_another_backward():
            self.abandon()
        while any(each.delivery.owner is owner for each in self._waiting):
            self._deliver_oldest()

    @torch.no_grad()
    def make_room(self, nbytes: int) -> None:
        """For so many more: deliver what is done, and more of the oldest if that would be too much."""
        while self._waiting and self._waiting[0].delivery.work.done:
            self._deliver_oldest()
        while self._limit_bytes is not None and self._waiting and self._nbytes + nbytes > self._limit_bytes:
            self._deliver_oldest()

    def defer(self, delivery: Delivery) -> None:
        """Deliver it later; only inside of a backward. Its output is NaN."""
        backward = torch._C._current_graph_task_id()
        if self._expected_by != backward:
            self._expected_by = backward
            compat.queue_engine_callback(self.deliver)
        self._waiting.append(_Pending(delivery, delivery.output._version))
        self._nbytes += delivery.nbytes

    def deliver(self) -> None:
        """Wait for all of them."""
        self._expected_by = None
        while self._waiting:
            self._deliver_oldest()

    @torch.no_grad()
    def abandon(self) -> None:
        """Those of a backward that did not come to its end, as FSDP2 leaves them: reduced, if all ranks came so far.

        One that has failed has said so where it was waited for, or says so to whoever waits for the next one.
        """
        self._expected_by = None
        while self._waiting:
            delivery, _ = self._waiting.popleft()
            try:
                delivery.wait()
            except LaneError:
                delivery.end_late(failed=True)
            else:
                delivery.end_late(failed=False)
        self._nbytes = 0

    @torch.no_grad()
    def _deliver_oldest(self) -> None:
        delivery, version = self._waiting.popleft()
        self._nbytes -= delivery.nbytes
        if not delivery.work.done:
            try:
                with self._stall.measure(self._recorder, delivery.work.label):
                    delivery.work.wait()
            except LaneError:
                delivery.end_late(failed=True)
                raise
        if delivery.was_changed_since(version):
            raise RuntimeError(
                f"a gradient of {delivery.work.label} was changed inside of the backward, before it had come: change "
                f"it after the backward, in parameter.register_post_accumulate_grad_hook(...), or set "
                f"ExtConfig(defer=False){see('gradients-are-guarded')}"
            )
        delivery.complete()


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()

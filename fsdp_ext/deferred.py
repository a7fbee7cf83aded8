"""Reduce-scatters under way while the backward goes on: the memory of their results, and when it is filled.

FSDP2 all-reduces a result over replicas (HSDP), divides it, and makes gradients of views of it, at once; on CPUs the
backward would stand still until the result has arrived. But the memory is ours to allocate, and PyTorch asks tensor
subclasses what functions do with them (``__torch_function__``), ``torch.distributed.all_reduce`` included.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import all_reduce
from torch.distributed.tensor import DTensor

from ddp_hooks.comm import LaneError, Recorder, Stall, Work, see
from ddp_hooks.comm.torch_compat.autograd import current_backward, inside_another_backward, queue_engine_callback
from ddp_hooks.comm.torch_compat.overrides import version_of, without_overrides

# Attributes that do not depend on values. (In Python each access makes another object, which is equal.)
_METADATA = tuple(getattr(Tensor, name).__get__ for name in ("dtype", "shape", "device", "layout"))


class DeferredOutput(Tensor):
    """Memory for a rank's part of the gradients; its reduction fills it, and is asked before functions use it."""

    reduction: Any  # fsdp_ext.reduce_scatter.LaneReduceScatter
    memory: Tensor  # the same, a plain tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with without_overrides():
            if func is torch.as_strided and args:  # for every parameter
                args[0].reduction.view()
                return func(*args, **kwargs)
            given = [each if isinstance(each, (list, tuple)) else (each,) for each in (*args, *kwargs.values())]
            for output in (each for several in given for each in several if isinstance(each, cls)):
                if output._takes_over(func, args, kwargs):
                    return None if func is all_reduce else args[0]
            return func(*args, **kwargs)

    def _takes_over(self, func: Any, args: Any, kwargs: Any) -> bool:
        takes_over = False
        if func in _METADATA:
            return False
        if func is all_reduce and not kwargs["async_op"]:
            takes_over = self.reduction.all_reduce(self.memory, kwargs["group"], kwargs["op"])
        elif func == Tensor.div_ and not kwargs and args[0] is self:
            takes_over = self.reduction.divide(args[1])
        elif func == Tensor.add_ and not kwargs:  # also +=
            takes_over = self.reduction.add(memory_of(args[0]), memory_of(args[1]))
        if not takes_over:
            self.reduction.finish()
        return takes_over


def deferred_output(memory: Tensor, reduction: Any) -> DeferredOutput:
    output = memory.as_subclass(DeferredOutput)
    output.reduction, output.memory = reduction, memory
    return output


def memory_of(tensor: Tensor) -> Tensor:
    return tensor.memory if isinstance(tensor, DeferredOutput) else tensor


class Delivery(NamedTuple):
    """Reduced gradients on their way: once ``work`` is complete, ``source / divisor`` belongs into ``output``.

    Or, without ``parameters``, a part of a sum that FSDP2 keeps (``set_requires_all_reduce(False)``).
    """

    work: Work
    source: Tensor  # (numel,), this rank's range of the memory in which sums are formed
    output: Tensor  # (numel,), which FSDP2 made the sharded gradients of, or keeps
    nbytes: int  # of the memory that is kept for it
    owner: object = None  # whose gradients these are
    saved: Mapping[Tensor, Tensor] = {}  # parameter -> gradient to accumulate into, hidden from FSDP2 until then
    parameters: tuple[Tensor, ...] = ()  # that may have gradients in the output
    divisor: float | None = None
    version: int = 0  # of the output, when it became NaN
    partial_sum: Tensor | None = None  # of earlier backwards, to be added to the source
    adds: bool = False  # to an output that has values

    def wait(self) -> None:
        self.work.wait()
        if self.partial_sum is not None:
            self.source.add_(self.partial_sum)
        if self.divisor is not None:
            self.source.div_(self.divisor)

    def complete(self) -> None:
        self.wait()
        self._fill()
        for parameter in self.saved:
            self._restore(parameter, add=True)

    def _fill(self) -> None:
        if self.adds:
            self.output.add_(self.source)
        else:
            self.output.copy_(self.source)

    @property
    def was_changed(self) -> bool:
        """True if somebody has written to the gradients since they became NaN."""
        if version_of(self.output) != self.version:
            return True
        # A write to a DTensor does not count for the tensor that it holds; FSDP2 has just made these DTensors.
        gradients = [parameter.grad for parameter in self.parameters if isinstance(parameter.grad, DTensor)]
        return any(version_of(grad) and _shares_memory(grad, self.output) for grad in gradients)

    def finalize(self, failed: bool) -> None:
        """Deliver after a backward that has failed, to gradients that are still NaN: nobody has written to them since.

        If the reduce-scatter has ``failed``, too, saved gradients come back, and others become None.
        """
        if not (self.parameters or self.saved or failed):
            self._fill()
        for parameter in (*self.parameters, *self.saved):
            grad = parameter.grad
            if grad is None or not _shares_memory(grad, self.output) or not _local(grad).isnan().all():
                continue
            if not failed:
                new = _local(grad)
                place = self.source.storage_offset() + new.storage_offset() - self.output.storage_offset()
                new.copy_(self.source.as_strided(new.shape, new.stride(), place))
            if parameter in self.saved:
                self._restore(parameter, add=not failed)
            elif failed:
                parameter.grad = None

    def _restore(self, parameter: Tensor, add: bool) -> None:
        """Make the saved gradient the parameter's again, plus the new one if ``add``; not if that was replaced."""
        new = parameter.grad
        if new is not None and _shares_memory(new, self.output):
            if add:
                _local(self.saved[parameter]).add_(_local(new))
            parameter.grad = self.saved[parameter]


class PendingReductions:
    """Deliveries that are due when the backward ends in which they were deferred.

    FSDP2 makes the sharded gradients of memory that is not filled yet. Until it is, it holds NaN: a hook inside of the
    backward that reads a gradient sees NaN, and one that changes it gets an error. Existing gradients are taken away,
    so that FSDP2 does not add NaN to them, and are accumulated into in the order of deliveries.
    """

    def __init__(self, limit_bytes: int | None, stall: Stall, recorder: Recorder) -> None:
        self._limit_bytes = limit_bytes  # most memory that deliveries may keep; None: no limit
        self._stall, self._recorder = stall, recorder
        self._deferred: deque[Delivery] = deque()
        self._nbytes = 0
        self._backward: int | None = None  # at its end they are delivered

    def __len__(self) -> int:
        return len(self._deferred)

    @torch.no_grad()
    def flush_owner(self, owner: object) -> None:
        """Deliver everything up to the last gradients of ``owner``, and drop the rest of a backward that has failed."""
        if self._backward != current_backward() and not inside_another_backward():
            self.drop()
        while any(delivery.owner is owner for delivery in self._deferred):
            self._deliver_oldest()

    @torch.no_grad()
    def make_room(self, nbytes: int) -> None:
        """Deliver everything complete, then wait for the oldest until ``nbytes`` more fit the limit."""
        while self._deferred and self._deferred[0].work.done:
            self._deliver_oldest()
        while self._limit_bytes is not None and self._deferred and self._nbytes + nbytes > self._limit_bytes:
            self._deliver_oldest()

    def defer(self, delivery: Delivery) -> None:
        """Deliver at the end of the backward that runs. The delivery's output is NaN."""
        backward = current_backward()
        if self._backward != backward:
            self._backward = backward
            queue_engine_callback(self.deliver_all)
        self._deferred.append(delivery._replace(version=version_of(delivery.output)))
        self._nbytes += delivery.nbytes

    def deliver_all(self) -> None:
        self._backward = None
        while self._deferred:
            self._deliver_oldest()

    @torch.no_grad()
    def drop(self) -> None:
        """Finalize deliveries of a backward that has failed: reduced, as FSDP2 leaves them, if all ranks came so far.

        A failed reduce-scatter has raised where it was waited for, or raises for whoever waits for the next one.
        """
        self._backward = None
        while self._deferred:
            delivery = self._deferred.popleft()
            failed = False
            try:
                delivery.wait()
            except LaneError:
                failed = True
            delivery.finalize(failed)
        self._nbytes = 0

    @torch.no_grad()
    def _deliver_oldest(self) -> None:
        delivery = self._deferred.popleft()
        self._nbytes -= delivery.nbytes
        if not delivery.work.done:
            try:
                with self._stall.measure(self._recorder, delivery.work.label):
                    delivery.work.wait()
            except LaneError:
                delivery.finalize(failed=True)
                raise
        if delivery.was_changed:
            raise RuntimeError(
                f"a gradient of {delivery.work.label} was changed inside of the backward, before it was ready: change "
                f"it after the backward, in parameter.register_post_accumulate_grad_hook(...), or set "
                f"ExtConfig(defer=False){see('gradients-are-guarded')}"
            )
        delivery.complete()


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _shares_memory(gradient: Tensor, output: Tensor) -> bool:
    return _local(gradient).untyped_storage().data_ptr() == output.untyped_storage().data_ptr()

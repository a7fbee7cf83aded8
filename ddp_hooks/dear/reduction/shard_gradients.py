"""Gradients of shards: the means of a reduction, and what earlier backwards have left.

Every shard gets its part as ``.grad``, as plain DDP would have left it. A gradient may be attached before it has been
reduced: ``optimizer.step()`` looks at every gradient's metadata first and at its values one parameter after another,
so an :class:`AsyncGradient` answers the first at once, and waits for its reduce-scatter at the second.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddp_hooks.comm import Recorder, Stall, Work
from ddp_hooks.comm.torch_compat.overrides import without_overrides
from ddp_hooks.dear.layout.placement import Shard, Shards
from ddp_hooks.dear.reduction.model_gradients import ModelGradients
from ddp_hooks.dear.reduction.reduction import Reduction
from ddp_hooks.intercept.guards import METADATA, GradientGuard


class ShardGradients:
    def __init__(self, shards: Shards, model_gradients: ModelGradients, recorder: Recorder) -> None:
        self.stall = Stall()  # of waits for reduce-scatters
        self.in_place = False  # the gradients attached last lie where they were reduced, just as they will be used
        self._shards = shards
        self._model_gradients = model_gradients
        self._recorder = recorder
        self._groups: list[_ReducedGroup] = []  # attached, and perhaps still under way

    def attach(self, reduction: Reduction) -> None:
        """Give every shard its gradient, which may still travel: read none before :meth:`wait`."""
        self.in_place = True
        marks = self._model_gradients.marks()
        used_everywhere = len(reduction.used) == len(marks)
        untouched = used_everywhere and all(isinstance(mark, GradientGuard) and not mark.zeroed for mark in marks)
        for work, atoms in reduction.works:
            sums = [each for atom in atoms for each in self._attach_atom(atom, reduction, marks, untouched)]
            self._groups.append(_ReducedGroup(work, atoms, sums))

    def defer(self) -> None:
        """Let every gradient that still travels wait for itself, when it is read."""
        for group in self._groups:
            if group.work.done:
                self._wait_for(group)
        self._groups = [group for group in self._groups if not group.is_complete]
        for group in self._groups:
            for shard in [shard for atom in group.atoms for shard in self._shards.of_atom[atom]]:
                if shard.tensor.grad is not None:
                    AsyncGradient.of(shard.tensor.grad, partial(self._wait_for, group))

    def wait(self) -> None:
        """Wait until every attached gradient holds its value; shards hold plain tensors then."""
        if not self._groups:
            return
        while self._groups:
            self._wait_for(self._groups[0])
            self._groups.pop(0)
        for shard in self._shards:
            gradient = shard.tensor.grad
            if isinstance(gradient, AsyncGradient):
                AsyncGradient.resolve(gradient)  # of the class: another thread may have resolved it

    @property
    def is_under_way(self) -> bool:
        return bool(self._groups)

    def works_by_atom(self) -> dict[int, Work]:
        """Return the reduce-scatters that have not been waited for."""
        return {atom: group.work for group in self._groups for atom in group.atoms}

    def _attach_atom(
        self, atom: int, reduction: Reduction, marks: Sequence[Tensor | None], untouched: bool
    ) -> list[_Sum]:
        """Give the atom's shards memory for their gradients; return the sums to form when the atom is reduced."""
        shards = self._shards.of_atom[atom]
        if not shards:
            return []
        reduced, bucket = reduction.reduced_view(atom), reduction.gradients[atom]
        wanted = shards[0].tensor.dtype
        in_place = reduced is bucket and reduced.dtype == wanted
        sums = []
        lengths = [shard.tensor.numel() for shard in shards]
        means = reduced.narrow(0, shards[0].offset, sum(lengths)).split(lengths)  # a rank's shards are neighbours
        for shard, mean in zip(shards, means, strict=True):
            base = shard.base
            if untouched and base is None and in_place:  # as in most steps
                shard.tensor.grad = mean
                continue
            index = shard.range.parameter
            if index not in reduction.used:
                gradient, in_place = base, False
            elif base is None and reduced.dtype == wanted:
                gradient = mean
            else:
                sums.append(_Sum.of(mean, bucket, shard))
                gradient, in_place = sums[-1].gradient, False
            shard.tensor.grad = attached = self._model_gradients.apply_zero_grad(index, gradient, marks)
            shard.base = None
            in_place = in_place and attached is gradient
        self.in_place = self.in_place and in_place
        return sums

    def _wait_for(self, group: _ReducedGroup) -> None:
        """Wait for a group, and form its sums, the first time."""
        with group.lock:  # another thread may look at gradients in the step
            if group.is_complete:
                return
            if not group.work.done:
                with self.stall.measure(self._recorder, group.work.label):
                    group.work.wait()
            if group.sums:
                with torch.no_grad(), without_overrides():  # the gradients may be those that wait
                    for each in group.sums:
                        each.complete()
            group.is_complete = True


@dataclass
class _ReducedGroup:
    """Gradients of one reduce-scatter, and the sums to form with them."""

    work: Work
    atoms: tuple[int, ...]
    sums: list[_Sum]
    is_complete: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class _Sum(NamedTuple):
    """Gradient of a shard that is not the mean alone: it has another type, or earlier backwards left some."""

    gradient: Tensor
    mean: Tensor
    base: Tensor | None

    @staticmethod
    def of(mean: Tensor, bucket_view: Tensor, shard: Shard) -> _Sum:
        """Form it in the memory of the mean, or of the bucket, if one has the right type; else in memory of its own."""
        if mean.dtype == shard.tensor.dtype:
            gradient = mean
        elif bucket_view.dtype == shard.tensor.dtype:
            gradient = bucket_view.narrow(0, shard.offset, shard.tensor.numel())
        else:
            gradient = torch.empty_like(shard.tensor)
        return _Sum(gradient, mean, shard.base)

    def complete(self) -> None:
        if self.gradient is not self.mean:
            self.gradient.copy_(self.mean)
        if self.base is not None:
            self.gradient.add_(self.base)


class AsyncGradient(Tensor):
    """Gradient in its final memory; any function that takes it waits until that memory holds the final values.

    It is a plain tensor from then on, so that later functions cost nothing.
    """

    wait: Callable[[], None]  # may be called again

    @staticmethod
    def of(gradient: Tensor, wait: Callable[[], None]) -> AsyncGradient:
        """Let ``gradient`` wait until ``wait`` has returned, which uses it ``without_overrides()`` if at all."""
        waiting: Any = gradient
        waiting.wait = wait  # before the class, as another thread may read the gradient
        waiting.__class__ = AsyncGradient
        made: AsyncGradient = waiting
        return made

    def resolve(self) -> None:
        vars(self).pop("wait", None)
        self.__class__ = Tensor  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in METADATA:
            return super().__torch_function__(func, types, args, kwargs or {})
        kwargs = kwargs or {}
        _wait_in([args, *kwargs.values()])
        return func(*args, **kwargs)


def _wait_in(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, AsyncGradient):
            wait = vars(value).get("wait")
            if wait is not None:  # else another thread has just done it
                wait()
            AsyncGradient.resolve(value)
        elif isinstance(value, list | tuple):
            _wait_in(value)

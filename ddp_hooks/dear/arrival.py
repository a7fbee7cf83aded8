"""Reduced gradients arrive at the shards that they are for.

Gradients kept from earlier backwards are added, and every shard gets its part as ``.grad``, as plain DDP would have
left it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ddp_hooks.comm import Recorder, Stall, Work
from ddp_hooks.dear.backpipe import Reduction
from ddp_hooks.dear.gradients import GradientKeeper
from ddp_hooks.dear.shards import Shard, ShardSet


class GradientArrival:
    """Attaches the gradients of a :class:`~ddp_hooks.dear.backpipe.Reduction` to shards.

    Args:
        sharded: the shards that get the gradients.
        keeper: knows what users have done to gradients since the backward.
        recorder: for the timeline.
    """

    def __init__(self, sharded: ShardSet, keeper: GradientKeeper, recorder: Recorder) -> None:
        self.stall = Stall()  # of waits for reduce-scatters
        self._sharded = sharded
        self._keeper = keeper
        self._recorder = recorder
        self._settlements: list[Callable[[], None]] = []  # of gradients that are attached, but may still travel

    def attach(self, reduction: Reduction) -> None:
        """Give every shard its gradient, which may still travel: until :meth:`settle`, using one waits for it."""
        for work, atoms in reduction.works:
            arrivals = [arrival for atom in atoms for arrival in self._attach_atom(atom, reduction)]
            settlement = self._settlement(work, arrivals)
            self._settlements.append(settlement)
            for atom in atoms:
                self._sharded.defer_gradients(atom, settlement)

    def settle(self) -> None:
        """Wait for every gradient that was attached; shards hold plain tensors then."""
        while self._settlements:
            self._settlements[0]()
            self._settlements.pop(0)
        self._sharded.resolve_gradients()

    def _attach_atom(self, atom: int, reduction: Reduction) -> list[_Arrival]:
        """Give the atom's shards memory for their gradients; returns what is to be done when the atom is reduced."""
        means, home = reduction.means_of(atom), reduction.gradients[atom]
        arrivals = []
        for shard in self._sharded.shards_of_atom[atom]:
            used = shard.interval.parameter in reduction.used
            gradient = shard.base
            if used:
                part = slice(shard.offset, shard.offset + shard.interval.end - shard.interval.start)
                arrivals.append(_Arrival.of(means[part], home[part], shard))
                gradient = arrivals[-1].gradient
            shard.tensor.grad = self._keeper.unless_discarded(shard, gradient)
            shard.base = None
        return arrivals

    def _settlement(self, work: Work, arrivals: Sequence[_Arrival]) -> Callable[[], None]:
        """A function that waits for ``work`` and then completes the gradients, the first time that it is called."""
        settled = False

        def settle() -> None:
            """Wait, and add what earlier backwards have left; may be called again."""
            nonlocal settled
            if settled:
                return
            if not work.done:
                with self.stall.measure(self._recorder, work.label):
                    work.wait()
            with torch.no_grad():
                for arrival in arrivals:
                    arrival.complete()
            settled = True

        return settle


class _Arrival(NamedTuple):
    """One shard's gradient: the mean over ranks, in the type of the shard, and what earlier backwards have left."""

    gradient: Tensor
    mean: Tensor
    base: Tensor | None

    @staticmethod
    def of(mean: Tensor, home: Tensor, shard: Shard) -> _Arrival:
        """In the memory of the mean, or of the bucket, if one has the right type; else in memory of its own."""
        fitting = [memory for memory in (mean, home) if memory.dtype == shard.tensor.dtype]
        return _Arrival(fitting[0] if fitting else torch.empty_like(shard.tensor), mean, shard.base)

    def complete(self) -> None:
        """The mean is there."""
        if self.gradient is not self.mean:
            self.gradient.copy_(self.mean)
        if self.base is not None:
            self.gradient.add_(self.base)

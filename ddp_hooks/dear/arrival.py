"""Reduced gradients arrive at the shards that they are for.

Gradients kept from earlier backwards are added, and every shard gets its part as ``.grad``, as plain DDP would have
left it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ddp_hooks.comm import Recorder, Stall, Work
from ddp_hooks.dear.backpipe import Reduction
from ddp_hooks.dear.gradients import GradientKeeper
from ddp_hooks.dear.update import Shard, Update


class GradientArrival:
    """Attaches the gradients of a :class:`~ddp_hooks.dear.backpipe.Reduction` to shards.

    Args:
        sharded: the shards that get the gradients.
        keeper: knows what users have done to gradients since the backward.
        recorder: for the timeline.
        stall: counts waits for reduce-scatters.
    """

    def __init__(self, sharded: Update, keeper: GradientKeeper, recorder: Recorder, stall: Stall) -> None:
        self.stall = stall
        self.in_place = False  # what was attached last lies where it was reduced, just as it will be used
        self._sharded = sharded
        self._keeper = keeper
        self._recorder = recorder
        self._settlements: list[tuple[tuple[int, ...], Callable[[], None]]] = []  # of atoms that may still travel
        self._work_of: dict[int, Work] = {}  # per atom that may still travel

    def attach(self, reduction: Reduction) -> None:
        """Give every shard its gradient, which may still travel: read none before :meth:`settle`."""
        self.in_place = True
        marks = self._keeper.marks()
        for work, atoms in reduction.works:
            arrivals = [arrival for atom in atoms for arrival in self._attach_atom(atom, reduction, marks)]
            self._settlements.append((atoms, self._settlement(work, arrivals)))
            self._work_of.update(dict.fromkeys(atoms, work))

    def defer(self) -> None:
        """Let every gradient that still travels wait for itself, when it is read."""
        settlements, self._settlements = self._settlements, []
        for atoms, settlement in settlements:
            if self._work_of[atoms[0]].done:
                settlement()
                continue
            self._settlements.append((atoms, settlement))
            for atom in atoms:
                self._sharded.defer_gradients(atom, settlement)
        if not self._settlements:
            self._work_of.clear()

    def settle(self) -> None:
        """Wait for every gradient that was attached; shards hold plain tensors then."""
        if not self._settlements:
            return
        while self._settlements:
            self._settlements[0][1]()
            self._settlements.pop(0)
        self._work_of.clear()
        self._sharded.resolve_gradients()

    @property
    def is_under_way(self) -> bool:
        """Whether something was attached and has not been waited for."""
        return bool(self._settlements)

    def under_way(self, atoms: Sequence[int]) -> set[Work]:
        """What reduces these atoms, as far as it has not been waited for."""
        return {self._work_of[atom] for atom in atoms if atom in self._work_of}

    def _attach_atom(
        self, atom: int, reduction: Reduction, marks: Sequence[Tensor | None]
    ) -> list[_Arrival]:
        """Give the atom's shards memory for their gradients; returns what is to be done when the atom is reduced."""
        shards = self._sharded.shards_of_atom[atom]
        if not shards:
            return []
        means, home = reduction.means_of(atom), reduction.gradients[atom]
        in_place = means is home and means.dtype == shards[0].tensor.dtype
        arrivals = []
        for shard, mean in zip(shards, _parts(means, shards), strict=True):
            index, base = shard.interval.parameter, shard.base
            if index not in reduction.used:
                gradient, in_place = base, False
            elif base is None and mean.dtype == shard.tensor.dtype:
                gradient = mean
            else:
                arrivals.append(_Arrival.of(mean, home, shard))
                gradient, in_place = arrivals[-1].gradient, False
            shard.tensor.grad = attached = self._keeper.unless_discarded(index, gradient, marks)
            shard.base = None
            in_place = in_place and attached is gradient
        self.in_place = self.in_place and in_place
        return arrivals

    def _settlement(self, work: Work, arrivals: Sequence[_Arrival]) -> Callable[[], None]:
        """A function that waits for ``work`` and then completes the gradients, the first time that it is called."""
        settled, lock = False, threading.Lock()  # another thread may look at gradients in the step

        def settle() -> None:
            """Wait, and add what earlier backwards have left; may be called again."""
            nonlocal settled
            with lock:
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


def _parts(flat: Tensor, shards: Sequence[Shard]) -> Sequence[Tensor]:
    """The parts of an atom's memory that belong to this rank's shards of it, which are neighbours."""
    lengths = [shard.tensor.numel() for shard in shards]
    return flat.narrow(0, shards[0].offset, sum(lengths)).split(lengths)


class _Arrival(NamedTuple):
    """One shard's gradient where the mean alone is not it: another type is wanted, or earlier backwards left some."""

    gradient: Tensor
    mean: Tensor
    base: Tensor | None

    @staticmethod
    def of(mean: Tensor, home: Tensor, shard: Shard) -> _Arrival:
        """In the memory of the mean, or of the bucket, if one has the right type; else in memory of its own.

        Args:
            mean: of the shard, (its length,), where it is reduced.
            home: of its atom, (numel,): its part of the bucket.
        """
        if mean.dtype == shard.tensor.dtype:
            gradient = mean
        elif home.dtype == shard.tensor.dtype:
            gradient = home.narrow(0, shard.offset, shard.tensor.numel())
        else:
            gradient = torch.empty_like(shard.tensor)
        return _Arrival(gradient, mean, shard.base)

    def complete(self) -> None:
        """The mean is there."""
        if self.gradient is not self.mean:
            self.gradient.copy_(self.mean)
        if self.base is not None:
            self.gradient.add_(self.base)

"""Reduced gradients arrive at the shards that they are for.

Gradients kept from earlier backwards are added, and every shard gets its part as ``.grad``, as plain DDP would have
left it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from ddp_hooks.comm import Recorder, Stall, Work
from ddp_hooks.dear.backpipe import Reduction
from ddp_hooks.dear.gradients import GradientKeeper
from ddp_hooks.dear.shards import ShardedOptimizer


class GradientArrival:
    """Attaches the gradients of a :class:`~ddp_hooks.dear.backpipe.Reduction` to shards.

    Args:
        sharded: the optimizer whose shards get the gradients.
        keeper: knows what users have done to gradients since the backward.
        recorder: for the timeline.
    """

    def __init__(self, sharded: ShardedOptimizer, keeper: GradientKeeper, recorder: Recorder) -> None:
        self.stall = Stall()  # of waits for reduce-scatters
        self._sharded = sharded
        self._keeper = keeper
        self._recorder = recorder
        self._settlements: list[Callable[[], None]] = []  # of gradients that are attached, but may still travel

    def attach(self, reduction: Reduction) -> None:
        """Give every shard its gradient, which may still travel: until :meth:`settle`, using one waits for it."""
        for work, atoms in reduction.works:
            sums = [pair for atom in atoms for pair in self._attach_atom(atom, reduction)]
            settlement = self._settlement(work, partial(_settle_all, reduction, atoms), sums)
            self._settlements.append(settlement)
            for atom in atoms:
                self._sharded.defer_gradients(atom, settlement)

    def settle(self) -> None:
        """Wait for every gradient that was attached; shards hold plain tensors then."""
        while self._settlements:
            self._settlements[0]()
            self._settlements.pop(0)
        self._sharded.resolve_gradients()

    def _attach_atom(self, atom: int, reduction: Reduction) -> list[tuple[Tensor, Tensor]]:
        """Give the atom's shards their part of its memory; returns which parts something is to be added to."""
        gradient = reduction.gradients[atom]
        sums = []
        for shard in self._sharded.shards_of_atom[atom]:
            length = shard.interval.end - shard.interval.start
            reduced = gradient[shard.offset : shard.offset + length]
            used = shard.interval.parameter in reduction.used
            if used and shard.base is not None:
                sums.append((reduced, shard.base))
            shard.tensor.grad = self._keeper.unless_discarded(shard, reduced if used else shard.base)
            shard.base = None
        return sums

    def _settlement(
        self, work: Work, bring_home: Callable[[], None], sums: list[tuple[Tensor, Tensor]]
    ) -> Callable[[], None]:
        """A function that waits for ``work`` and then forms the sums, the first time that it is called."""
        settled = False

        def settle() -> None:
            nonlocal settled
            if settled:
                return
            if not work.done:
                with self.stall.measure(self._recorder, work.label):
                    work.wait()
            with torch.no_grad():
                bring_home()
                for reduced, base in sums:
                    reduced.add_(base)
            settled = True

        return settle


def _settle_all(reduction: Reduction, atoms: Iterable[int]) -> None:
    for atom in atoms:
        reduction.settle(atom)

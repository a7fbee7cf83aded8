"""Gathers that begin under the backward, for replicated updates, as far as the link is idle there.

The gradients of a model's last layers are reduced first and needed last, and most backwards leave the link idle for
a while. So some gathers start right behind their reduce-scatters instead of at ``step()``. That is a guess: until then
a rank may still clip, replace or drop what it has reduced. At ``step()`` every rank tells the others in one byte
whether it has left everything alone; if one has not, the lanes gather again. What is submitted is the same on every
rank either way. (In zhang2023dear, section III-B, all gathers begin after the backward.)
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_hooks.comm import Lanes, Partition, Work
from ddp_hooks.dear.arrangement import Arrangement
from ddp_hooks.dear.arrival import GradientArrival

logger = logging.getLogger("ddp_hooks")

_NUM_SAMPLES = 6  # backwards that are timed
_WARM_UP = 2  # of them, that do not count
_LARGEST_FRACTION = 0.25  # of all bytes; more takes processor time from the backward, and delays its reduce-scatters
_MAX_REPEATS = 3  # steps in which everything was gathered again, after which nobody guesses any more


class EarlyGathers:
    """Launches the gathers of replicated updates: some in the backward, the others at ``step()``.

    Args:
        lanes: where they run; of threads.
        arrangement: the groups to gather, in the order of the forward.
        arrival: knows what a gather is to follow.
        fraction: of all bytes, which begin in the backward; None: as many as its idle time has room for.
        goodput_bytes_s: of the link, to find out about idle times; None: there is no knowing, so assume there are none.
    """

    def __init__(
        self,
        lanes: Lanes,
        arrangement: Arrangement,
        arrival: GradientArrival,
        fraction: float | None,
        goodput_bytes_s: float | None,
    ) -> None:
        self._lanes = lanes
        self._arrangement = arrangement
        self._arrival = arrival
        self._fraction = 0.0 if goodput_bytes_s is None and fraction is None else fraction
        self._goodput_bytes_s = goodput_bytes_s
        self._times_s: list[float] = []  # of backwards, from the first bucket on
        self._begin_s = 0.0  # of this one
        self._measures = False
        self._num_measured = 0  # steps
        self._due: list[tuple[int, int]] = []  # (atoms that are reduced first, group), for those that begin early
        self._launched = 0  # of them, in this backward
        self._reduced: dict[int, tuple[Partition, Work]] = {}  # atoms of this backward
        self._works: dict[int, Work] = {}  # early gathers that nobody has asked for yet, per group
        self._verdict: _Verdict | None = None  # of the latest step
        self._num_repeats = 0

    def plan(self) -> None:
        """The arrangement has new groups: what was begun was for others."""
        self.discard()
        self._num_repeats = 0
        self._measures = self._fraction is None
        self._num_measured = 0
        self._times_s = []
        self._begin_early(self._fraction or 0.0)

    # -- backward ---------------------------------------------------------------------------------------------------

    def backward_begins(self) -> None:
        """Nothing of this backward is reduced yet."""
        self.discard()
        self._launched = 0
        self._begin_s = time.perf_counter()

    def reduced(self, atoms: Sequence[int], partitions: Sequence[Partition], work: Work) -> None:
        """The reduce-scatter of these atoms was submitted, in their order: submit the gathers that are to follow."""
        if not self._due:
            return
        self._reduced.update({atom: (part, work) for atom, part in zip(atoms, partitions, strict=True)})
        while self._launched < len(self._due) and self._due[self._launched][0] <= len(self._reduced):
            number = self._due[self._launched][1]
            parts = [self._reduced[atom] for atom in self._arrangement.gather_groups[number]]
            label = f"{self._arrangement.gather_labels[number]}, early"
            after = {work for _, work in parts}
            self._works[number] = self._lanes.all_gather([partition for partition, _ in parts], label, after)
            self._launched += 1

    def backward_ends(self) -> None:
        """All reduce-scatters were submitted."""
        self._reduced.clear()
        if self._measures:
            self._times_s.append(time.perf_counter() - self._begin_s)

    def discard(self) -> None:
        """No step follows the backward: wait for what it has begun; its memory will be written."""
        while self._works:
            self._works.popitem()[1].wait()

    # -- step -------------------------------------------------------------------------------------------------------

    def launch(self, memory: Sequence[Tensor], left_alone: bool) -> list[Work]:
        """Submit the other gathers; returns the work of every group.

        Args:
            memory: per atom, (numel,), what is to be gathered.
            left_alone: this rank's ranges lie there as they were reduced.
        """
        arranged, (early, self._works) = self._arrangement, (self._works, {})
        works: list[Work] = []
        verdict = None
        for number, (partitions, label) in enumerate(
            zip(arranged.gathers(memory), arranged.gather_labels, strict=True)
        ):
            if number not in early:
                after = self._arrival.under_way(arranged.gather_groups[number])
                works.append(self._lanes.all_gather(partitions, label, after))
            else:  # the last ones, so nothing that is needed sooner waits for the verdict
                verdict = verdict or _Verdict.ask(self._lanes, left_alone)
                after = {early[number], verdict.work}
                works.append(self._lanes.all_gather(partitions, label, after, only_if=verdict.is_negative))
        self._verdict = verdict
        if self._measures:
            self._num_measured += 1
            if self._num_measured == _NUM_SAMPLES:
                self._decide(left_alone)
        return works

    def conclude(self) -> None:
        """What was launched is complete: note whether it was worth while."""
        verdict, self._verdict = self._verdict, None
        if verdict is not None and verdict.is_negative():
            self._num_repeats += 1
            if self._num_repeats == _MAX_REPEATS:
                logger.info("gradients are changed between backward and step(), so no gather begins before it")
                self._begin_early(0.0)

    # -- how many ---------------------------------------------------------------------------------------------------

    def _decide(self, left_alone: bool) -> None:
        """Enough backwards were timed: agree on a share, the smallest that a rank has room for."""
        self._measures = False
        fractions: list[float] = [0.0] * self._lanes.world_size
        dist.all_gather_object(fractions, self._room() if left_alone else 0.0, group=self._lanes.group)
        self._begin_early(min(fractions))
        if self._due and self._lanes.rank == 0:
            total = len(self._arrangement.gather_groups)
            logger.info("%d of %d gathers begin in the backward, where the link is idle", len(self._due), total)

    def _room(self) -> float:
        """The fraction of all bytes that travels well in the idle time of the backwards that were timed."""
        assert self._goodput_bytes_s is not None and self._arrangement.layout is not None
        others = self._lanes.world_size - 1
        nbytes = sum(atom.nbytes for atom in self._arrangement.layout.atoms) * others / self._lanes.world_size
        reduce_s = nbytes / self._goodput_bytes_s  # all gathers take as long
        idle_s = statistics.median(self._times_s[_WARM_UP:] or [0.0]) - reduce_s
        return min(max(0.0, idle_s / reduce_s), _LARGEST_FRACTION)

    def _begin_early(self, fraction: float) -> None:
        """From the next backward on, begin early with this share of all bytes: with what is needed last."""
        arranged = self._arrangement
        self._due = []
        if arranged.layout is None:
            return
        atoms = arranged.layout.atoms
        room = fraction * sum(atom.nbytes for atom in atoms)
        for number in reversed(range(len(arranged.gather_groups))):
            group = arranged.gather_groups[number]
            room -= sum(atoms[index].nbytes for index in group)
            if room < 0:
                break
            self._due.append((max(group) + 1, number))
        self._due.sort()


@dataclass
class _Verdict:
    """Whether every rank has left its gradients alone: known on all of them when ``work`` is complete."""

    changed: Tensor  # (world_size,), uint8
    work: Work

    @classmethod
    def ask(cls, lanes: Lanes, left_alone: bool) -> _Verdict:
        changed = torch.zeros(lanes.world_size, dtype=torch.uint8)
        changed[lanes.rank] = not left_alone
        partition = Partition(changed, tuple(range(lanes.world_size + 1)))
        return cls(changed, lanes.all_gather([partition], "whether gradients were left alone"))

    def is_negative(self) -> bool:
        """Whether a rank has changed something."""
        return bool(self.changed.any())

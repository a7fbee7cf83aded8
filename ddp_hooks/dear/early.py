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
from torch import Tensor

from ddp_hooks.comm import Lanes, Partition, Work
from ddp_hooks.dear.arrangement import Arrangement
from ddp_hooks.dear.arrival import GradientArrival

logger = logging.getLogger("ddp_hooks")

_NUM_SAMPLES = 6  # backwards that are timed
_WARM_UP = 2  # of them, that do not count
_LARGEST_FRACTION = 0.25  # of all bytes; more takes processor time from the backward, and delays its reduce-scatters
_MEMORY = 0.8  # how much of a wrong guess still counts a step later
_MAX_WRONG = 1.7  # wrong guesses that count: two in a row, or three in eight steps


class EarlyGathers:
    """Launches the gathers of replicated updates: some in the backward, the others at ``step()``.

    Args:
        lanes: where they run; of threads.
        arrangement: the groups to gather, in the order of the forward.
        arrival: knows what a gather is to follow.
        fraction: of all bytes, which begin in the backward; None: as many as its idle time has room for.
        goodput_bytes_s: of the link, to find out about idle times; None: there are none, as far as is known.
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
        if fraction is None and goodput_bytes_s is None:
            fraction = 0.0
        self._fraction = fraction
        self._goodput_bytes_s = goodput_bytes_s
        self._times_s: list[float] = []  # of backwards, from the first bucket on
        self._begin_s = 0.0  # of this one
        self._num_steps = 0
        self._num_left_alone = 0  # of them
        self._found: float | None = None  # the fraction that is in use, once ranks have told theirs
        self._room: _Numbers | None = None  # what fraction of all bytes ranks have room for, once they have told
        self._due: list[tuple[int, int]] = []  # (atoms that are reduced first, group), for those that begin early
        self._launched = 0  # of them, in this backward
        self._reduced: dict[int, tuple[Partition, Work]] = {}  # atoms of this backward
        # Early gathers that nobody has asked for yet, per group: the same groups on every rank, so what changes their
        # number happens where all ranks are.
        self._works: dict[int, Work] = {}
        self._verdict: _Numbers | None = None  # which ranks have changed their gradients before the latest step
        self._wrong = 0.0  # guesses of late

    def plan(self) -> None:
        """The arrangement has new groups: what was begun was for others. Idle times are what they were."""
        self.wait()
        self.conclude()
        self._works.clear()
        self._wrong = 0.0
        if self._found is None:
            self._num_steps, self._num_left_alone, self._times_s = 0, 0, []
        self._begin_early(self._fraction or self._found or 0.0)

    # -- backward ---------------------------------------------------------------------------------------------------

    def backward_begins(self) -> None:
        """Nothing of this backward is reduced yet. If no step has followed the one before, all was for nothing."""
        self.wait()
        if self._works:
            self._works.clear()
            self._note(right=False)
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
        if self._is_measuring:
            self._times_s.append(time.perf_counter() - self._begin_s)

    def wait(self) -> None:
        """Return when nothing that has begun writes into the buckets any more."""
        for work in self._works.values():
            work.wait()

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
                verdict = verdict or _Numbers.gather(
                    self._lanes, not left_alone, torch.uint8, "whether gradients were left alone"
                )
                after = {early[number], verdict.work}
                works.append(self._lanes.all_gather(partitions, label, after, only_if=verdict.any))
        self._verdict = verdict
        if self._is_measuring:
            self._num_steps += 1
            self._num_left_alone += left_alone
            if not self._is_measuring:
                self._room = _Numbers.gather(
                    self._lanes, self._own_room(), torch.float64, "the idle times of backwards"
                )
        return works

    def conclude(self) -> None:
        """What was launched is complete: note whether the guess was right, and what ranks have found out."""
        verdict, self._verdict = self._verdict, None
        room, self._room = self._room, None
        if verdict is not None:
            self._note(right=not verdict.any())
        if room is not None:
            self._found = room.smallest()
            self._begin_early(self._found)
            logger.debug(
                "%d of %d gathers begin in the backward", len(self._due), len(self._arrangement.gather_groups)
            )

    # -- how many ---------------------------------------------------------------------------------------------------

    @property
    def _is_measuring(self) -> bool:
        return self._fraction is None and self._num_steps < _NUM_SAMPLES

    def _note(self, right: bool) -> None:
        self._wrong = _MEMORY * self._wrong + (not right)
        if self._wrong > _MAX_WRONG and self._due:
            logger.debug("gradients change between backward and step(), so no gather begins before it any more")
            self._begin_early(0.0)

    def _own_room(self) -> float:
        """The fraction of all bytes that travels well in the idle time of the backwards that were timed."""
        assert self._goodput_bytes_s is not None and self._arrangement.layout is not None
        others = self._lanes.world_size - 1
        nbytes = sum(atom.nbytes for atom in self._arrangement.layout.atoms) * others / self._lanes.world_size
        if nbytes == 0 or self._num_left_alone < _NUM_SAMPLES // 2 or len(self._times_s) <= _WARM_UP:
            return 0.0
        reduce_s = nbytes / self._goodput_bytes_s  # all gathers take as long
        idle_s = statistics.median(self._times_s[_WARM_UP:]) - reduce_s
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
class _Numbers:
    """A number of every rank: known on all of them when ``work`` is complete."""

    values: Tensor  # (world_size,)
    work: Work

    @classmethod
    def gather(cls, lanes: Lanes, own: float, dtype: torch.dtype, label: str) -> _Numbers:
        values = torch.zeros(lanes.world_size, dtype=dtype, device="cpu")
        values[lanes.rank] = own
        return cls(values, lanes.all_gather([Partition(values, tuple(range(lanes.world_size + 1)))], label))

    def any(self) -> bool:
        """Whether a rank's number is not zero; its work is complete."""
        return bool(self.values.any())

    def smallest(self) -> float:
        self.work.wait()
        return float(self.values.min())

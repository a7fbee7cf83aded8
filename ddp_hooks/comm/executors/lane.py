"""Lanes: ordered streams of communication beside the training thread, each with its own process group.

Every rank submits the same work to the same lane in the same order; nothing else is needed for agreement. On CPU
backends a lane is a thread that runs collectives over point-to-point messages, because gloo's own reduce-scatter moves
an all-reduce (:mod:`~ddp_hooks.comm.executors.thread_lane`). On NCCL it is a stream that runs the native collectives
(:mod:`~ddp_hooks.comm.executors.stream_lane`).
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ddp_hooks.comm.accounting import Traffic
from ddp_hooks.comm.algorithms.collectives import Partition
from ddp_hooks.comm.algorithms.exchange import Algorithm
from ddp_hooks.comm.collective_check import is_checking
from ddp_hooks.comm.executors.work import Work

FIRST_SPECIAL_TAG = 1 << 30
"""Tags below are those of slices: two bits for their kind, then a counter."""
_TAGS_PER_KIND = 1 << 20


def special_tag(kind: int, number: int) -> int:
    """Return the tag of the ``number``-th exchange of a kind, >= 0, that no other exchange has."""
    return FIRST_SPECIAL_TAG + 1 + kind * _TAGS_PER_KIND + number % _TAGS_PER_KIND


@dataclass
class LaneSettings:
    """Settings of lanes.

    Args:
        slice_bytes: largest message of an all-gather. Messages of reduce-scatters have at most
            ``min(slice_bytes / 3, 2 * slice_bytes / (P - 1))``: a lane receives at most ``4 * slice_bytes`` of a
            dtype at a time.
        timeout_s: seconds without progress after which a wait fails.
        stall_warning_s: seconds after which a wait is logged, with what it waits for.
        verify: ranks compare every collective before it moves, on CPUs; see :mod:`ddp_hooks.comm.collective_check`.
        tag_by_label: on CPUs tags come from labels, so ranks that submit in different orders time out instead of
            exchanging wrong data.
        node_size: ranks per node, on CPUs; with more than one, collectives run on two levels.
    """

    slice_bytes: int = 1 << 20
    timeout_s: float = 600.0
    stall_warning_s: float = 60.0
    verify: bool = field(default_factory=is_checking)
    tag_by_label: bool = False
    node_size: int = 1


class Lane(Protocol):
    """One ordered stream of communication."""

    traffic: Traffic

    def reduce_scatter(self, partitions: Sequence[Partition], label: str, divisor: int = 1) -> Work:
        """Sum every partition over the ranks and divide, in place. Rank r gets its range; the rest is undefined."""

    def all_gather(self, partitions: Sequence[Partition], label: str, after: Collection[Work] = ()) -> Work:
        """Copy rank r's range of every partition from rank r to all ranks, in place.

        Args:
            partitions: data to gather; rank r holds range r of each.
            label: name for messages.
            after: work of these lanes, submitted before, that must complete first.
        """

    def run(self, algorithm: Algorithm, label: str, after: Collection[Work] = (), tag: int | None = None) -> Work:
        """Run any algorithm once ``after`` is complete.

        A ``tag`` from :func:`special_tag` keeps its messages apart from all others, even where ranks differ in order.
        """

    def close(self, unfinished: bool = False) -> threading.Thread | None:
        """Take no more work, and end when the rest is done; return the thread that ends, if there is one.

        With ``unfinished`` wait only for messages under way.
        """

"""Announcements of prefetching loaders: a forward takes the batch that was handed out last.

Prevents: the batch of a loader that was left, taken for the one that trains.
"""

from __future__ import annotations

from typing import Any

from ddp_hooks.embedding.step.prefetch import Announcement, PrefetchQueue


def test_the_latest_batch_is_taken() -> None:
    class Loader:
        pass

    nothing: Any = {}
    queue, (first, second) = PrefetchQueue(), (Announcement(Loader(), nothing, None) for _ in range(2))
    queue.announce("left early", first)
    queue.announce("trains", second)
    assert queue.take() is second
    queue.announce("trains", second)
    queue.announce("left early", first)
    assert queue.take() is first, "who has spoken before may speak last"
    assert queue.take() is second and queue.take() is None

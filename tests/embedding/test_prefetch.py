"""Announcements of prefetching loaders: a forward takes the batch that was handed out last.

Prevents: the batch of a loader that was left, taken for the one that trains.
"""

from __future__ import annotations

from typing import Any

from ddp_hooks.embedding.prefetch import Announcement, Announcements


def test_the_latest_batch_is_taken() -> None:
    class Loader:
        pass

    nothing: Any = {}
    announcements, (first, second) = Announcements(), (Announcement(Loader(), nothing, None) for _ in range(2))
    announcements.announce("left early", first)
    announcements.announce("trains", second)
    assert announcements.take() is second
    announcements.announce("trains", second)
    announcements.announce("left early", first)
    assert announcements.take() is first, "who has spoken before may speak last"
    assert announcements.take() is second and announcements.take() is None

"""What travels as one message of those requests that are ready together; the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from ddp_hooks.coordination.request import Request


def in_order(ready: Sequence[Request]) -> list[Request]:
    """By priority, the largest first, and as they were agreed upon among equals."""
    return sorted(ready, key=lambda request: -request.priority)


def fused(ready: Sequence[Request], limit_bytes: int, mix_groups: bool) -> list[list[Request]]:
    """Neighbouring all-reduces of one type together, while they have at most ``limit_bytes``; others alone.

    A request is never cut, so that a group always travels as one.
    """
    messages: list[list[Request]] = []
    total, key = 0, None
    alone = count()
    for request in in_order(ready):
        nbytes = request.nbytes
        fits = request.operation == "all_reduce" and len(request.dtypes) == 1 and (mix_groups or not request.grouped)
        # Only with those of one priority, or what is urgent would wait for what is not.
        own_key = (request.dtypes, request.mean, request.priority) if fits else ("alone", next(alone), 0)
        if own_key != key or total + nbytes > limit_bytes:
            messages.append([])
            total, key = 0, own_key
        messages[-1].append(request)
        total += nbytes
    return messages

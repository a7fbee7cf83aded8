"""Where the blocks of a vector begin, and how much of each is kept. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence


def even_bounds(numel: int, parts: int) -> tuple[int, ...]:
    """Where ``parts`` ranges of almost equal length begin and end, ``parts + 1`` ascending offsets."""
    return tuple(numel * part // parts for part in range(parts + 1))


def block_counts(k: int, bounds: Sequence[int]) -> tuple[int, ...]:
    """How many entries of each block are kept, about ``k`` in all: at least one of each block that has any."""
    parts = len(bounds) - 1
    shares = even_bounds(k, parts)
    return tuple(
        min(bounds[b + 1] - bounds[b], max(1, shares[b + 1] - shares[b])) for b in range(parts)
    )

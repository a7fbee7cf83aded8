"""Runs one algorithm of TopK alone, as a generator that returns."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from ddp_hooks.comm import Round


def returning(algorithm: Generator[Round, None, Any], results: dict[int, Any], rank: int) -> Any:
    """The algorithm, as executors take it, and what it returns in ``results``."""
    results[rank] = yield from algorithm


def teams_of(world_size: int) -> list[tuple[int, str]]:
    """Every number of teams, with every Spar-All-Gather that it allows."""
    divisors = [d for d in range(1, world_size + 1) if world_size % d == 0]
    return [(d, "b") for d in divisors if d > 1] + [(d, "r") for d in divisors if d & (d - 1) == 0]

"""For debugging: ranks compare every collective before it moves, so that a difference is an error and not a hang.

With ``DDP_HOOKS_VERIFY=1`` in the environment of every process each lane sends a line of text before each piece of
work, in P - 1 short messages.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from ddp_hooks.comm.agreement import VERIFY, first_difference
from ddp_hooks.comm.algorithms.collectives import Partition, ring_all_gather
from ddp_hooks.comm.algorithms.exchange import Algorithm

_LINE_BYTES = 512


def is_checking() -> bool:
    """Return True if the environment asks for the check."""
    return os.environ.get(VERIFY, "0") not in ("", "0")


def lines_of_all(line: str, rank: int, world_size: int) -> tuple[list[Tensor], Algorithm]:
    """Return memory for every rank's line, and the algorithm that fills it; see :func:`difference`."""
    lines = [torch.zeros(_LINE_BYTES, dtype=torch.uint8) for _ in range(world_size)]
    data = line.encode()[:_LINE_BYTES]
    lines[rank][: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return lines, ring_all_gather(lines, rank)


def difference(lines: Sequence[Tensor], ranks: Sequence[int]) -> str | None:
    """Return what each rank is about to move, if ranks differ; else None."""
    texts = [bytes(line.tolist()).rstrip(b"\0").decode(errors="replace") for line in lines]
    if len(set(texts)) == 1:
        return None
    return first_difference([{"the next collective": text} for text in texts], ranks)


def content_of(partitions: Sequence[Partition]) -> str:
    """Return sizes and types, for a line."""
    return " + ".join(f"{flat.numel()} of {flat.dtype} in {len(bounds) - 1}" for flat, bounds in partitions)

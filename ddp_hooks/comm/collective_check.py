"""For debugging: ranks compare every collective before it moves, so that a difference is an error and not a hang.

Hooks compare their set-up, and what they lay out, once; in steady state not a byte is sent about it. With
``DDP_HOOKS_VERIFY=1`` in the environment of every process each lane sends a line of text before each of its
pieces of work, which costs P - 1 short messages.
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
    """Whether the environment asks for it."""
    return os.environ.get(VERIFY, "0") not in ("", "0")


def lines_of_all(line: str, rank: int, world_size: int) -> tuple[list[Tensor], Algorithm]:
    """Memory for every rank's line, and what fills it; see :func:`difference`."""
    lines = [torch.zeros(_LINE_BYTES, dtype=torch.uint8) for _ in range(world_size)]
    data = line.encode()[:_LINE_BYTES]
    lines[rank][: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return lines, ring_all_gather(lines, rank)


def difference(lines: Sequence[Tensor], ranks: Sequence[int]) -> str | None:
    """Who is about to move what, if that is not the same everywhere."""
    texts = [bytes(line.tolist()).rstrip(b"\0").decode(errors="replace") for line in lines]
    if len(set(texts)) == 1:
        return None
    return first_difference([{"the next collective": text} for text in texts], ranks)


def content_of(partitions: Sequence[Partition]) -> str:
    """Sizes and types, as lines have them."""
    return " + ".join(f"{flat.numel()} of {flat.dtype} in {len(bounds) - 1}" for flat, bounds in partitions)

"""Turns of a partition in exact 16 bits on a native lane, compared with sums in the order of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_hooks.comm import Partition, aligned_bounds
from ddp_hooks.comm.executors.stream_lane import StreamLane
from ddp_hooks.comm.wire.exact import BLOCK
from ddp_hooks.comm.wire.exact_native import ExactNativeWire
from tests.support.devices import rank_device

NUM_BLOCKS = 70  # whole ones of a range: 2 are spare
SHARE = NUM_BLOCKS * BLOCK + 96


def fits(generator: torch.Generator, numel: int, turn: int) -> Tensor:
    return torch.randn(numel, generator=generator).bfloat16().float()


def fits_float16(generator: torch.Generator, numel: int, turn: int) -> Tensor:
    return (torch.randn(numel, generator=generator) * 2**10).half().float()


def fits_nothing(generator: torch.Generator, numel: int, turn: int) -> Tensor:
    return torch.randn(numel, generator=generator)


def fits_partly(generator: torch.Generator, numel: int, turn: int) -> Tensor:
    """Every fourth block does not fit."""
    values = fits(generator, numel, turn)
    values[5 :: 4 * BLOCK] = 1 / 3
    return values


def fits_partly_float16(generator: torch.Generator, numel: int, turn: int) -> Tensor:
    values = fits_float16(generator, numel, turn)
    values[5 :: 4 * BLOCK] = 2.0**-40
    return values


def changes_a_little(generator: torch.Generator, numel: int, turn: int) -> Tensor:
    """Two other blocks of every range in each turn."""
    values = fits(generator, numel, turn)
    for block in (turn, NUM_BLOCKS // 2 + turn):
        values[block * BLOCK + 7 :: SHARE] = 1 / 3
    return values


def table(generator: torch.Generator, numel: int, turn: int) -> Tensor:
    """Rows that few tokens ask for."""
    rows = torch.rand(numel // BLOCK, 1, generator=generator) < 0.01 * (1 + turn // 5)
    return torch.cat([(fits_nothing(generator, len(rows) * BLOCK, turn).view(-1, BLOCK) * rows).flatten(),
                      torch.zeros(numel % BLOCK)])  # fmt: skip


def overflows_first(generator: torch.Generator, numel: int, turn: int) -> Tensor:
    """As with a scaler whose first scales are too large."""
    values = fits_float16(generator, numel, turn)
    if turn < 5 or turn == 12:
        values[::3], values[1::3], values[2::3] = torch.inf, -torch.inf, torch.nan
    return values


class Turn(NamedTuple):
    narrow: torch.dtype | None
    num_wide: int
    sent_bytes: int


def turns(rank: int, world_size: int, kind: Callable[..., Tensor], number: int, extra: int = 37) -> list[Turn]:
    """Reduce-scatter ``number`` times, with another partition that travels as it is; compare bits, and tell how."""
    group, device = dist.group.WORLD, rank_device()
    assert group is not None
    lane = StreamLane(group, device)
    numel = world_size * SHARE + extra
    bounds = aligned_bounds(numel, world_size, 4)
    wire = ExactNativeWire(bounds)
    found = []
    for turn in range(number):
        generators = [torch.Generator().manual_seed(100 * turn + each) for each in range(world_size)]
        values = [kind(generator, numel, turn) for generator in generators]
        partition = Partition(values[rank].clone().to(device), bounds, wire)
        other = Partition(torch.ones(64 * world_size, device=device), aligned_bounds(64 * world_size, world_size, 4))
        before = lane.traffic.sent_bytes
        lane.reduce_scatter([other, partition], f"numbers of turn {turn}", world_size).wait()
        sent = lane.traffic.sent_bytes - before - other.nbytes * (world_size - 1) // world_size
        total = values[0].clone()
        for each in values[1:]:
            total = total + each
        own = slice(bounds[rank], bounds[rank + 1])
        mean, expected = partition.flat[own].cpu(), (total / world_size)[own]
        if wire.narrow is not None or world_size == 2:  # sums in the order of ranks
            different = mean.view(torch.int32) != expected.view(torch.int32)
            assert bool((mean.isnan() & expected.isnan())[different].all()), f"turn {turn}"
        else:
            torch.testing.assert_close(mean, expected, rtol=1e-4, atol=1e-2, equal_nan=True)
        found.append(Turn(wire.narrow, sum(wire.num_wide), sent))
        assert bool((other.flat[other.bounds[rank] : other.bounds[rank + 1]] == 1).all())
    wire.read_flags()
    return found


WHOLE = None
HALF, BRAIN = torch.float16, torch.bfloat16
CASES: dict[str, tuple[Any, list[torch.dtype | None]]] = {  # how numbers travel, turn by turn
    "fits": (fits, [WHOLE] * 3 + [BRAIN] * 3),
    "float16": (fits_float16, [WHOLE] * 3 + [HALF] * 3),
    "nothing": (fits_nothing, [WHOLE] * 8),
    "partly": (fits_partly, [WHOLE] * 3 + [BRAIN] * 3),
    "partly float16": (fits_partly_float16, [WHOLE] * 3 + [HALF] * 3),
    # Blocks become wide, one after the other, until they are too many.
    "a little": (changes_a_little, [WHOLE] * 3 + [BRAIN] * 15 + [WHOLE] * 2),
    "table": (table, [WHOLE] * 24),
    # Looks at 0, 2, 5, 6 and 7: those before show nothing.
    "overflows first": (overflows_first, [WHOLE] * 8 + [HALF] * 7),
}

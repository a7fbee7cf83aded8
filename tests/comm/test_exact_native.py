"""Exact 16 bits on native lanes, with gloo and tensors on CPUs: bits of a sum in the order of ranks, and no other ones.

Prevents: a number that is rounded and nobody hears of it, ranks that expect messages of other lengths, and a training
run that raises because a few numbers fit no longer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ddp_hooks.comm import Partition, aligned_bounds
from ddp_hooks.comm.executors.stream_lane import StreamLane
from ddp_hooks.comm.wire.exact import BLOCK
from ddp_hooks.comm.wire.exact_native import ExactNativeWire
from tests.support.exact_native import CASES, NUM_BLOCKS, SHARE, fits, fits_nothing, fits_partly, turns
from tests.support.messages import message_of
from tests.support.workers import WorkerPools

CPU = torch.device("cpu")
NOTHING = "nothing was raised"


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_same_bits(workers: WorkerPools, world_size: int, name: str) -> None:
    kind, expected = CASES[name]
    by_rank = workers(world_size).run(turns, kind, len(expected))
    for found in by_rank:
        assert [turn.narrow for turn in found] == expected
        assert [turn[:2] for turn in found] == [turn[:2] for turn in by_rank[0]]


def bytes_per_number(rank: int, world_size: int, kind: Callable[..., Tensor]) -> float:
    return turns(rank, world_size, kind, 5)[4].sent_bytes / (SHARE * (world_size - 1))


def test_bytes(workers: WorkerPools) -> None:
    for kind, nbytes in ((fits, 2 + 4 / NUM_BLOCKS), (fits_partly, 2.5 + 4 / NUM_BLOCKS), (fits_nothing, 4)):
        assert workers(3).run(bytes_per_number, kind) == pytest.approx([nbytes] * 3, abs=0.03)


@pytest.mark.parametrize(("num_blocks", "extra"), [(1, 0), (7, 5), (8, 0), (8, 33), (9, 1000)])
def test_lengths(workers: WorkerPools, num_blocks: int, extra: int) -> None:
    """Few blocks of a range travel as they are; tails, and what is behind the last whole block, too."""
    workers(3).run(lengths, num_blocks * BLOCK * 3 + extra)


def lengths(rank: int, world_size: int, numel: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    lane, bounds = StreamLane(group, CPU), aligned_bounds(numel, world_size, 4)
    wire, own = ExactNativeWire(bounds), slice(bounds[rank], bounds[rank + 1])
    for _ in range(5):
        values = [torch.randint(-9, 9, (numel,)).float() for _ in range(world_size)]
        dist.broadcast_object_list(values)
        for each in values:
            each[numel // 2] += 2.0**-20
        flat = values[rank].clone()
        lane.reduce_scatter([Partition(flat, bounds, wire)], "numbers").wait()
        assert torch.equal(flat[own], ((values[0] + values[1]) + values[2])[own])
    assert (wire.narrow is not None) == (bounds[1] >= 8 * BLOCK)


def change(rank: int, world_size: int, num_blocks: int, culprit: int, turns_after: int) -> list[str]:
    """Blocks of the last range that fit until turn 5, and not any more on one rank; return what each turn raises."""
    group = dist.group.WORLD
    assert group is not None
    lane, bounds = StreamLane(group, CPU), aligned_bounds(world_size * SHARE, world_size, 4)
    wire, messages = ExactNativeWire(bounds), []
    for turn in range(6 + turns_after):
        flat = fits(torch.Generator().manual_seed(turn + rank), world_size * SHARE, turn)
        if turn >= 5 and rank == culprit:
            flat[bounds[-2] : bounds[-2] + num_blocks * BLOCK] *= 1 / 3
        reduce = partial(lane.reduce_scatter, [Partition(flat, bounds, wire)], "layer7.weight")
        messages.append(message_of(lambda reduce=reduce: reduce().wait()))  # type: ignore[misc]
    return [*messages, message_of(wire.read_flags)]


@pytest.mark.parametrize("culprit", [0, 2])
@pytest.mark.parametrize("num_blocks", [2, 3, NUM_BLOCKS])
@pytest.mark.parametrize("turns_after", [0, 1])
def test_numbers_that_fit_no_longer(workers: WorkerPools, num_blocks: int, culprit: int, turns_after: int) -> None:
    """Two spare blocks may; if there are more, all ranks raise in the next turn, or where there is none, at the end."""
    for messages in workers(3).run(change, num_blocks, culprit, turns_after):
        assert set(messages[:6]) == {NOTHING}
        if num_blocks == 2:
            assert set(messages) == {NOTHING}
            continue
        assert messages[6].startswith("RuntimeError: gradients lost bits in the last step, in the reduce-scatter of ")
        assert all(part in messages[6] for part in ("layer7.weight", "torch.bfloat16", 'wire="float32"'))
        assert set(messages[7:]) <= {NOTHING}, "an error that was raised is not raised again"

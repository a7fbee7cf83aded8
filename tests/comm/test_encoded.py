"""Encoded collectives against sums in a loop, bit for bit, on the fabric and on lanes.

Prevents: replicas that differ; sums in another order; gradients that rounding eats for ever; an overflow that stays;
numbers that depend on where slices are cut.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ddp_hooks.comm import DifferenceWire, LaneSettings, Partition, Recorder, RoundedWire, run_on_fabric
from ddp_hooks.comm.algorithms.encoded import (
    add_encoded,
    encoded_all_gather,
    encoded_gather_bytes,
    encoded_reduce_scatter,
    encoded_scatter_bytes,
    sum_bytes,
)
from ddp_hooks.comm.algorithms.exchange import Algorithm
from ddp_hooks.comm.algorithms.scratch import Scratch
from ddp_hooks.comm.executors.fabric import RankTraffic
from ddp_hooks.comm.executors.lanes import Lanes, StreamLane
from ddp_hooks.comm.executors.slices import Slice, all_gather_slices, reduce_scatter_slices
from ddp_hooks.comm.wire.codecs import Bf16, Codec, IntBlocks
from tests.support.codecs import normal, there_and_back
from tests.support.messages import message_of
from tests.support.workers import WorkerPools

CODECS: list[Codec] = [Bf16(), IntBlocks(8, 256), IntBlocks(4, 64, feedback=0.25)]
CPU = torch.device("cpu")


def sizes_of(world_size: int) -> list[int]:
    """Lengths of ranges: unequal, one of them 0, one of a single element."""
    return [(0, 1, 300, 257)[(rank + world_size) % 4] for rank in range(world_size)]


def scratch_of(nbytes: int) -> Tensor:
    return torch.full((nbytes,), 255, dtype=torch.uint8)  # NaN, if it were read


def inputs(world_size: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[list[Tensor]]:
    """Return chunks by rank, then owner."""
    sizes = sizes_of(world_size)
    return [[normal(n, seed + 100 * r + c).to(dtype) for c, n in enumerate(sizes)] for r in range(world_size)]


def scatter(
    chunks: list[list[Tensor]], codec: Codec, divisor: int = 1, residuals: list[list[Tensor]] | None = None
) -> list[RankTraffic]:
    algorithms = []
    for rank, own in enumerate(chunks):
        scratch = scratch_of(encoded_scatter_bytes(own, rank, codec))
        kept = residuals[rank] if residuals else None
        algorithms.append(encoded_reduce_scatter(range(len(chunks)), rank, own, codec, kept, scratch, divisor))
    return run_on_fabric(algorithms)


def gather(chunks: list[list[Tensor]], codec: Codec) -> list[RankTraffic]:
    algorithms, wire = [], RoundedWire(codec)
    for rank, own in enumerate(chunks):
        algorithms.append(encoded_all_gather(own, rank, wire, scratch_of(encoded_gather_bytes(own, wire))))
    return run_on_fabric(algorithms)


@pytest.mark.parametrize("world_size", range(1, 10))
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_sums_are_formed_in_the_order_of_ranks(world_size: int, codec: Codec) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        chunks = inputs(world_size, dtype=dtype)
        given = [[chunk.clone() for chunk in own] for own in chunks]
        traffic = scatter(chunks, codec, divisor=3)
        for owner in range(world_size):
            wide = torch.promote_types(dtype, torch.float32)
            total = torch.zeros(sizes_of(world_size)[owner], dtype=wide)
            for rank in range(world_size):
                values = given[rank][owner].to(wide)
                total = total + (values if rank == owner else there_and_back(codec, values))
            assert torch.equal(chunks[owner][owner], (total / 3).to(dtype))
            others = [c for c in range(world_size) if c != owner]
            assert all(torch.equal(chunks[owner][c], given[owner][c]) for c in others)
            assert traffic[owner].sent_bytes == sum(codec.nbytes(chunks[0][c].numel()) for c in others)
            assert traffic[owner].rounds == min(1, world_size - 1)


@pytest.mark.parametrize("world_size", range(1, 10))
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_all_ranks_gather_the_same(world_size: int, codec: Codec) -> None:
    chunks = inputs(world_size)
    owned = [chunks[rank][rank].clone() for rank in range(world_size)]
    traffic = gather(chunks, codec)
    for rank, owner in itertools.product(range(world_size), repeat=2):
        assert torch.equal(chunks[rank][owner], there_and_back(codec, owned[owner]))
    for rank in range(world_size):
        sent = [each for each in range(world_size) if each != (rank + 1) % world_size]
        assert traffic[rank].sent_bytes == (sum(codec.nbytes(owned[c].numel()) for c in sent) if world_size > 1 else 0)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_nothing_is_lost(world_size: int, codec: Codec) -> None:
    """Sums of all inputs are those of all outputs, with the residuals."""
    sizes = sizes_of(world_size)
    residuals = [[torch.zeros(n) for n in sizes] for _ in range(world_size)]
    given, sums = ([torch.zeros(n, dtype=torch.float64) for n in sizes] for _ in range(2))
    for step in range(20):
        chunks = inputs(world_size, 1000 * step)
        for owner in range(world_size):
            given[owner] += sum(own[owner].double() for own in chunks)
        scatter(chunks, codec, residuals=residuals)
        for owner in range(world_size):
            sums[owner] += chunks[owner][owner]
    for owner in range(world_size):
        kept = sum(own[owner].double() for own in residuals)
        torch.testing.assert_close(sums[owner] + kept, given[owner], rtol=0, atol=1e-4)
        assert not residuals[owner][owner].any()


@pytest.mark.parametrize("world_size", [1, 2, 5])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_differences_bring_replicas_nearer(world_size: int, codec: Codec) -> None:
    """Replicas stay equal bit for bit. With values at rest, each gather takes off most of the difference."""
    precise = [normal(n, owner).double() for owner, n in enumerate(sizes_of(world_size))]
    chunks = [[torch.zeros(len(each)) for each in precise] for _ in range(world_size)]
    for step in range(4):
        before = [each.clone() for each in chunks[0]]
        algorithms, shown = [], [torch.zeros(len(each)) for each in precise]
        for rank, own in enumerate(chunks):
            wire = DifferenceWire(codec, precise[rank], shown[rank])
            algorithms.append(encoded_all_gather(own, rank, wire, scratch_of(encoded_gather_bytes(own, wire))))
        run_on_fabric(algorithms)
        assert all(map(torch.equal, shown, chunks[0]))
        for owner, each in enumerate(precise):
            expected = before[owner] + there_and_back(codec, each - before[owner]).float()
            assert all(torch.equal(own[owner], expected) for own in chunks)
            if len(each):
                assert (each - expected).abs().max() <= 5 * (1 / 14.99) ** (step + 1) + 1e-6


def test_a_residual_of_ones_own_range_is_added_once() -> None:
    """A checkpoint of another number of ranks brings it."""
    own, residual = torch.ones(4), torch.tensor([1.0, 2.0, 3.0, 4.0])
    payloads = [torch.empty(Bf16().nbytes(4), dtype=torch.uint8) for _ in range(2)]
    Bf16().encode(torch.full((4,), 2.0), payloads[0])
    add_encoded(own, 1, payloads, Bf16(), residual, Scratch(scratch_of(sum_bytes(own))), 2)
    assert own.tolist() == [2.0, 2.5, 3.0, 3.5] and not residual.any()


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_an_overflow_is_visible_and_not_kept(codec: Codec) -> None:
    chunks, residuals = inputs(3), [[torch.zeros(n) for n in sizes_of(3)] for _ in range(3)]
    owner = sizes_of(3).index(257)
    chunks[0 if owner else 1][owner][7] = torch.inf
    scatter(chunks, codec, 2, residuals)
    assert [bool(chunks[r][r].isfinite().all()) for r in range(3)] == [r != owner for r in range(3)]
    assert all(bool(each.isfinite().all()) for own in residuals for each in own)


# -- slices and lanes -------------------------------------------------------------------------------------------------


def one_after_the_other(slices: Iterator[Slice]) -> Algorithm:
    for piece in slices:
        assert piece.dtype == torch.uint8
        yield from piece.start(scratch_of(piece.scratch_numel))


def partitions_of(codec: Codec, world_size: int) -> list[Partition]:
    bounds = (0, *itertools.accumulate(sizes_of(world_size)))
    return [
        Partition(normal(bounds[-1], rank), bounds, RoundedWire(codec, torch.zeros(bounds[-1])))
        for rank in range(world_size)
    ]


def gathered(partition: Partition, codec: Codec) -> Partition:
    """Return the partition as it is gathered."""
    return partition._replace(wire=RoundedWire(codec))


def residual_of(partition: Partition) -> Tensor:
    assert isinstance(partition.wire, RoundedWire) and partition.wire.residual is not None
    return partition.wire.residual


def on_fabric(partitions: Sequence[Partition], slice_bytes: int, scatters: bool) -> None:
    algorithms = []
    for rank, each in enumerate(partitions):
        slices = all_gather_slices([each], rank, slice_bytes)
        if scatters:
            slices = reduce_scatter_slices([each], rank, slice_bytes, len(partitions))
        algorithms.append(one_after_the_other(slices))
    run_on_fabric(algorithms)


def means(codec: Codec, world_size: int, slice_bytes: int) -> list[Tensor]:
    """Return all numbers after a reduce-scatter, a gather of its result, and one of differences."""
    partitions = partitions_of(codec, world_size)
    on_fabric(partitions, slice_bytes, scatters=True)
    on_fabric([gathered(each, codec) for each in partitions], slice_bytes, scatters=False)
    after = [each.flat.clone() for each in partitions]
    precise = partitions[0]._replace(flat=normal(partitions[0].flat.numel(), 7)).ranges
    wires = [DifferenceWire(codec, each, torch.empty_like(each)) for each in precise]
    differences = [each._replace(wire=wire) for each, wire in zip(partitions, wires, strict=True)]
    on_fabric(differences, slice_bytes, scatters=False)
    return [*after, *(each.flat for each in partitions), *map(residual_of, partitions)]


@pytest.mark.parametrize("world_size", [2, 3, 7])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_numbers_do_not_depend_on_slices(world_size: int, codec: Codec) -> None:
    whole = means(codec, world_size, 1 << 30)
    for slice_bytes in (1, 300, 1000):
        found = means(codec, world_size, slice_bytes)
        assert all(map(torch.equal, whole, found))


def on_lanes(rank: int, world_size: int, native: bool) -> tuple[list[Tensor], int]:
    """Rounds of all partitions; the own numbers, and bytes that were sent."""
    assert dist.group.WORLD is not None
    settings = LaneSettings(slice_bytes=700, timeout_s=20, stall_warning_s=10)
    lanes = Lanes(dist.group.WORLD, 2, CPU, settings, Recorder())
    lane = StreamLane(dist.group.WORLD, CPU) if native else None
    found, exact = [], Partition(torch.ones(world_size), tuple(range(world_size + 1)))
    for codec in CODECS:
        partition = partitions_of(codec, world_size)[rank]
        gather = gathered(partition, codec)
        for _ in range(2):
            if lane is not None:
                lane.reduce_scatter([exact, partition], "numbers", world_size).wait()
                lane.all_gather([exact, gather], "numbers").wait()
            else:
                lanes.reduce_scatter([exact, partition], "numbers", world_size).wait()
                lanes.all_gather([gather], "numbers").wait()
                lanes.all_gather([exact], "numbers").wait()
        found += [partition.flat, residual_of(partition)]
    sent = (lane or lanes).traffic.sent_bytes
    lanes.close()
    return [*found, exact.flat], sent


@pytest.mark.parametrize("world_size", [2, 3])
def test_lanes(workers: WorkerPools, world_size: int) -> None:
    """Threads and streams, with real messages, bring the numbers of the fabric."""
    on_threads = workers(world_size).run(on_lanes, False)
    on_streams = workers(world_size).run(on_lanes, True)
    for (numbers, sent), (others, sent_on_stream) in zip(on_threads, on_streams, strict=True):
        assert all(map(torch.equal, numbers, others))
        assert 0 < sent <= sent_on_stream, "there gathered payloads have the length of the longest"
    for index, codec in enumerate(CODECS):
        twin = partitions_of(codec, world_size)
        for _ in range(2):
            on_fabric(twin, 10_000, scatters=True)
            on_fabric([gathered(each, codec) for each in twin], 10_000, scatters=False)
        for rank, (numbers, _) in enumerate(on_threads):
            expected = [twin[rank].flat, residual_of(twin[rank])]
            assert all(map(torch.equal, numbers[2 * index : 2 * index + 2], expected))


def different_codecs(rank: int, world_size: int) -> str:
    assert dist.group.WORLD is not None
    settings = LaneSettings(timeout_s=20, stall_warning_s=10, verify=True)
    lanes = Lanes(dist.group.WORLD, 1, CPU, settings, Recorder())
    partition = partitions_of(IntBlocks(4, 64 * (rank + 1)), world_size)[rank]
    message = message_of(lanes.reduce_scatter([partition], "numbers").wait)
    lanes.close()
    return message


def test_ranks_with_different_codecs(workers: WorkerPools) -> None:
    """Payloads of the same length would be read wrongly."""
    for message in workers(2).run(different_codecs):
        assert "IntBlocks(bits=4, block=64" in message and "IntBlocks(bits=4, block=128" in message

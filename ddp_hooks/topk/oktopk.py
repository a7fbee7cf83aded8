"""Ok-Topk: thresholds instead of selections, regions of equal load, a balanced all-gather (li2022oktopk).

Row 4 of SparDL's Table I. Thresholds and regions are estimated anew every so many steps and used in between, so the
number of entries varies; only the global threshold discards anything on the way.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from ddp_hooks.comm import Recv, Round, Send, bruck_all_gather, round_of
from ddp_hooks.topk.blocks import even_bounds
from ddp_hooks.topk.direct import direct_reduce_scatter, gather_numbers
from ddp_hooks.topk.exchange import Exchange
from ddp_hooks.topk.ledger import Ledger
from ddp_hooks.topk.passes import reaching
from ddp_hooks.topk.primitives import kth_largest
from ddp_hooks.topk.scattered import Scattered
from ddp_hooks.topk.sparse import SparseVector, concatenated, empty_like
from ddp_hooks.topk.wire import Wire

_IMBALANCE = 4  # times the mean, from which on entries are spread evenly before the all-gather


@dataclass
class OkTopkEstimates:
    """What is used for several steps; of one working vector.

    Args:
        threshold_interval: steps between two estimates of the thresholds.
        region_interval: steps between two estimates of the regions.
    """

    threshold_interval: int = 32
    region_interval: int = 64
    step: int = 0
    local_threshold: float = 0.0
    global_threshold: float = 0.0
    bounds: list[int] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        """As plain numbers and lists."""
        return asdict(self)

    @staticmethod
    def from_state(state: dict[str, Any]) -> OkTopkEstimates:
        """The reverse of :meth:`state_dict`."""
        return OkTopkEstimates(**state)


def oktopk(
    ledger: Ledger,
    gradient: Scattered | None,
    k: int,
    rank: int,
    world_size: int,
    wire: Wire,
    estimates: OkTopkEstimates,
) -> Exchange:
    """The entries of the sum that reach a global threshold, about ``k``.

    Args:
        ledger: of this worker's residual; closed in the end.
        gradient: added to it, in the pass that selects; None if it was.
        k: entries to keep.
        rank, world_size: of the group.
        wire: how entries travel.
        estimates: changed here.
    """
    numel = ledger.work.numel()
    anew = estimates.step % estimates.threshold_interval == 0
    mine = _reaching_local_threshold(ledger.work, gradient, k, anew, estimates)
    if estimates.step % estimates.region_interval == 0 or not estimates.bounds:
        estimates.bounds = yield from _balanced_regions(mine.indices, numel, rank, world_size)
    estimates.step += 1
    region = yield from direct_reduce_scatter(ledger.take(mine, wire), estimates.bounds, rank, wire)
    region = region.shifted(estimates.bounds[rank])
    if anew:
        magnitudes = yield from _gather_magnitudes(region.values, rank, world_size)
        keep = min(k, magnitudes.numel())
        estimates.global_threshold = kth_largest(magnitudes, keep) if keep else 0.0
    reaches = ~(region.values.abs() < estimates.global_threshold)  # also what is not a number, which close() refuses
    ledger.discard(region.at(~reaches))
    kept = ledger.round(region.at(reaches), wire)
    result = yield from _balanced_all_gather(kept, numel, rank, world_size, wire)
    ledger.close(result)
    return result


def _reaching_local_threshold(
    work: Tensor, gradient: Scattered | None, k: int, anew: bool, estimates: OkTopkEstimates
) -> SparseVector:
    if not work.numel():
        return empty_like(work)
    if anew:
        if gradient is not None:
            gradient.add_to(work)
            gradient = None
        estimates.local_threshold = kth_largest(work.abs(), min(k, work.numel()))
    return reaching(work, estimates.local_threshold, 2 * k, gradient)  # messages stay bounded


def _balanced_regions(
    indices: Tensor, numel: int, rank: int, world_size: int
) -> Generator[Round, None, list[int]]:
    """Regions that hold about as many entries each: the mean over ranks of where each would cut."""
    positions = [len(indices) * part // world_size for part in range(1, world_size)]
    cuts = [int(indices[position]) if len(indices) else numel for position in positions]
    everyone = yield from gather_numbers(cuts, rank, world_size, indices.device)
    means = [sum(cuts) // world_size for cuts in zip(*everyone, strict=True)]
    return [0, *means, numel]


def _gather_magnitudes(values: Tensor, rank: int, world_size: int) -> Generator[Round, None, Tensor]:
    counts = [numbers[0] for numbers in (yield from gather_numbers([values.numel()], rank, world_size, values.device))]
    return torch.cat((yield from bruck_all_gather(values.abs(), counts, range(world_size), rank)))


def _balanced_all_gather(vector: SparseVector, numel: int, rank: int, world_size: int, wire: Wire) -> Exchange:
    """All entries on all ranks; where one rank has very many, they are first spread evenly."""
    device = vector.values.device
    counts = [numbers[0] for numbers in (yield from gather_numbers([len(vector)], rank, world_size, device))]
    if max(counts) * world_size > _IMBALANCE * sum(counts):
        vector, counts = yield from _spread(vector, counts, numel, rank, wire)
    sizes = [wire.nbytes(numel, count) if count else 0 for count in counts]
    message = wire.encode(vector, numel, len(vector))[: sizes[rank]]
    messages = yield from bruck_all_gather(message, sizes, range(world_size), rank)
    return concatenated([
        wire.decode(message, numel, count) if count else empty_like(vector.values)
        for message, count in zip(messages, counts, strict=True)
    ])  # fmt: skip


def _spread(
    vector: SparseVector, counts: Sequence[int], numel: int, rank: int, wire: Wire
) -> Generator[Round, None, tuple[SparseVector, list[int]]]:
    """Equal parts of all entries, in their order: every overlap of what a rank has and what one gets is a message."""
    world_size = len(counts)
    have = [sum(counts[:r]) for r in range(world_size + 1)]
    get = even_bounds(have[-1], world_size)

    def overlap(sender: int, receiver: int) -> tuple[int, int]:
        first, last = max(have[sender], get[receiver]), min(have[sender + 1], get[receiver + 1])
        return first, max(first, last)

    parts = {}
    exchanges: list[Recv | Send] = []
    arriving = {}
    for peer in range(world_size):
        first, last = overlap(rank, peer)
        parts[peer] = vector.at(slice(first - have[rank], last - have[rank]))
        first, last = overlap(peer, rank)
        if peer != rank and last > first:
            nbytes = wire.nbytes(numel, last - first)
            arriving[peer] = torch.empty(nbytes, dtype=torch.uint8, device=vector.values.device)
            exchanges.append(Recv(peer, arriving[peer]))
    for peer, part in parts.items():
        if peer != rank and len(part):
            exchanges.append(Send(peer, wire.encode(part, numel, len(part))))
    yield round_of(*exchanges)
    received = []
    for peer in range(world_size):
        first, last = overlap(peer, rank)
        if peer == rank:
            received.append(parts[rank])
        elif last > first:
            received.append(wire.decode(arriving[peer], numel, last - first))
    return concatenated(received), [get[r + 1] - get[r] for r in range(world_size)]

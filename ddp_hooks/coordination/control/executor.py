"""Submits agreed messages to lanes: fused all-reduces, and every other collective by itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence

import torch
from torch import Tensor

from ddp_hooks.comm import (
    Algorithm,
    Lanes,
    Partition,
    Recv,
    Round,
    Send,
    ThreadWork,
    aligned_bounds,
    pairwise_exchange,
    ring_all_gather,
    round_of,
    without_messages,
)
from ddp_hooks.comm.executors.lanes import Lane
from ddp_hooks.comm.torch_compat.overrides import copy_all
from ddp_hooks.coordination.control.send_queue import Message
from ddp_hooks.coordination.control.submission import Submission


class Executor:
    """Submits messages on one thread, in agreed order."""

    def __init__(self, lanes: Lanes, on_end: Callable[[int, list[Submission]], None]) -> None:
        self._lanes = lanes
        self._on_end = on_end  # called on a lane's thread, with the number of a message

    def start(self, message: Message, mine: Sequence[Submission | None]) -> ThreadWork:
        """Move a message; ``mine``: a submission of this rank for every request, or None if it has no more data."""
        requests = message.requests
        submissions = [each for each in mine if each is not None]
        label = ", ".join(request.name for request in requests[:3]) + (", …" if len(requests) > 3 else "")
        lane = self._lanes.next_lane()
        lane.run(without_messages(lambda: _note_start(submissions)), label)
        divisor = self._lanes.world_size if requests[0].mean else 1
        if requests[0].operation == "all_reduce":
            tensors: list[Tensor] = []
            for request, submission in zip(requests, mine, strict=True):
                zeros = (torch.zeros(spec.shape, dtype=spec.torch_dtype) for spec in request.tensors)
                tensors += zeros if submission is None else submission.tensors
            self._all_reduce(lane, tensors, divisor, label)
        elif requests[0].operation == "reduce_scatter":
            (tensor,), world_size = submissions[0].tensors, self._lanes.world_size
            rows = tensor.clone(memory_format=torch.contiguous_format)  # the caller's tensor stays as it is
            share = rows.numel() // world_size
            submissions[0].result = rows.chunk(world_size)[self._lanes.rank]
            partition = Partition(rows.view(-1), tuple(share * rank for rank in range(world_size + 1)))
            lane.reduce_scatter([partition], label, divisor)
        else:
            lane.run(_keep_result(submissions[0]), label)
        work = lane.run(without_messages(lambda: self._on_end(message.number, submissions)), label)
        assert isinstance(work, ThreadWork), "tensors are on CPUs"
        return work

    def _all_reduce(self, lane: Lane, tensors: Sequence[Tensor], divisor: int, label: str) -> None:
        """Reduce-scatter and all-gather a single contiguous tensor in place, and several tensors in a copy."""
        in_place = len(tensors) == 1 and tensors[0].is_contiguous()
        flat = tensors[0].view(-1) if in_place else tensors[0].new_empty(sum(map(Tensor.numel, tensors)))
        parts = [part.view(t.shape) for part, t in zip(flat.split([t.numel() for t in tensors]), tensors, strict=True)]
        partition = Partition(flat, aligned_bounds(flat.numel(), self._lanes.world_size, flat.element_size()))
        # Submitted in any case: another rank's tensor may have other strides, and a lane's tags count submissions.
        lane.run(without_messages(lambda: None if in_place else copy_all(parts, tensors)), label)
        lane.reduce_scatter([partition], label, divisor)
        lane.all_gather([partition], label)
        lane.run(without_messages(lambda: None if in_place else copy_all(tensors, parts)), label)


def _note_start(submissions: Sequence[Submission]) -> None:
    now_s = time.perf_counter()
    for submission in submissions:
        submission.started_s = now_s


def _keep_result(submission: Submission) -> Algorithm:
    assert submission.algorithm is not None
    result = yield from submission.algorithm
    if submission.request.operation != "exchange":  # a user's generator may return anything
        submission.result = result


def broadcast_tensor(tensor: Tensor, rank: int, world_size: int, root: int) -> Algorithm:
    """Copy contiguous ``tensor`` of rank ``root`` to all ranks, in place; the root sends ``2 * (P - 1) / P`` of it."""
    flat = tensor.view(-1)  # a scatter, then an all-gather
    chunks = Partition(flat, aligned_bounds(flat.numel(), world_size, flat.element_size())).ranges
    if rank == root:
        yield round_of(*(Send(peer, chunk) for peer, chunk in enumerate(chunks) if peer != root))
    else:
        yield round_of(Recv(root, chunks[rank]))
    yield from ring_all_gather(chunks, rank)


def all_gather_rows(rows: Tensor, rank: int, world_size: int) -> Generator[Round, None, Tensor]:
    """Return the rows of all ranks, (sum of n, …), for contiguous ``rows``, (n, …), where n may differ by rank."""
    counts = torch.zeros(world_size, dtype=torch.int64)
    counts[rank] = rows.shape[0]
    yield from ring_all_gather(list(counts.split(1)), rank)
    result = rows.new_empty(int(counts.sum()), *rows.shape[1:])
    parts = list(result.split(counts.tolist()))
    parts[rank].copy_(rows)
    yield from ring_all_gather([part.view(-1) for part in parts], rank)
    return result


def all_to_all_rows(rows: Tensor, splits: Sequence[int], rank: int, world_size: int) -> Generator[Round, None, Tensor]:
    """Send rank r the next ``splits[r]`` of contiguous ``rows``; return the rows for this rank, by rank."""
    outgoing_counts = list(torch.tensor(splits, dtype=torch.int64).split(1))
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size)]
    counts[rank].copy_(outgoing_counts[rank])
    yield from pairwise_exchange(outgoing_counts, counts, rank)
    received = [int(number) for number in counts]
    result = rows.new_empty(sum(received), *rows.shape[1:])
    outgoing, incoming = rows.split(list(splits)), result.split(received)
    incoming[rank].copy_(outgoing[rank])
    yield from pairwise_exchange([part.view(-1) for part in outgoing], [part.view(-1) for part in incoming], rank)
    return result

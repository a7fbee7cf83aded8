"""Table 2 of the EmbRace paper, counted: what its approaches send, as generators run for all workers in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddp_hooks.comm import (
    Algorithm,
    Send,
    pairwise_exchange,
    ring_all_gather,
    run_on_fabric,
)

NUM_ROWS, DIM = 960, 256  # divisible by all numbers of workers counted here
DENSITY = 0.25
APPROACHES = ("AlltoAll", "AllReduce", "PS", "AllGather")
_STRIDE = round(1 / DENSITY)  # a worker's batch has every fourth row, and so equally many of every server


@dataclass(frozen=True)
class Count:
    """What a worker sends in one step, on average.

    Args:
        sent: bytes of vectors and gradients, over those of the table.
        messages: with these.
        rounds: in which these travel, one after another.
        ids: bytes of ids, over those of the table.
    """

    sent: float
    messages: float
    rounds: int = 0
    ids: float = 0.0


def table_2(name: str, workers: int) -> Count:
    """The paper's formula, its (M / B) and β apart; with a server on every worker (n = N)."""
    pairs = workers - 1
    return {
        "AlltoAll": Count(2 * pairs * DENSITY / workers, 2 * pairs),
        "AllReduce": Count(2 * pairs / workers, 2 * pairs),
        "PS": Count(2 * workers * DENSITY / workers, 2 * workers),
        "AllGather": Count(pairs * DENSITY, pairs),
    }[name]


def count(name: str, workers: int) -> Count:
    """What is sent in truth."""
    if NUM_ROWS % (workers * _STRIDE) or DIM % workers:
        raise ValueError(f"{workers} workers do not share {NUM_ROWS} rows of {DIM} numbers equally")
    run, run_ids = _APPROACHES[name]
    table_bytes = NUM_ROWS * DIM * 4
    sent, messages, rounds = _on_fabric(run, workers)
    return Count(sent / table_bytes, messages, rounds, _on_fabric(run_ids, workers)[0] / table_bytes)


_Make = Callable[[int, int], Algorithm]  # of a number of workers and a rank


def _on_fabric(make: _Make, workers: int) -> tuple[float, float, int]:
    """Bytes and messages, the mean over ranks, and rounds."""
    messages = [0]

    def listened(algorithm: Algorithm) -> Algorithm:
        for exchanges in algorithm:
            messages[0] += sum(isinstance(exchange, Send) for exchange in exchanges)
            if exchanges:
                yield exchanges

    traffic = run_on_fabric([listened(make(workers, rank)) for rank in range(workers)])
    sent = sum(each.sent_bytes for each in traffic) / workers
    return sent, messages[0] / workers, max(each.rounds for each in traffic)


def _exchange(shape: Sequence[int], workers: int, rank: int, dtype: torch.dtype = torch.float32) -> Algorithm:
    """One message of that shape from every worker to every other."""
    outgoing, incoming = ([torch.zeros(*shape, dtype=dtype) for _ in range(workers)] for _ in range(2))
    yield from pairwise_exchange(outgoing, incoming, rank)


def _columns(workers: int, rank: int) -> Algorithm:
    """Columns of the rows that each other worker looks up, and then of the gradients of its own rows."""
    rows = torch.arange(rank % _STRIDE, NUM_ROWS, _STRIDE)
    for _ in range(2):
        yield from _exchange((len(rows), DIM // workers), workers, rank)


def _all_reduce(workers: int, rank: int) -> Algorithm:
    """In a ring, as the paper has it, each of whose halves sends as many messages of as many bytes as an all-gather."""
    chunks = list(torch.zeros(NUM_ROWS * DIM).chunk(workers))
    for _ in range(2):
        yield from ring_all_gather(chunks, rank)


def _asked(workers: int, rank: int) -> list[Tensor]:
    """The rows of each server that a worker's batch has; servers own equal ranges of rows."""
    rows = torch.arange(rank % _STRIDE, NUM_ROWS, _STRIDE)
    return [rows[rows // (NUM_ROWS // workers) == server] for server in range(workers)]


def _pull_and_push(workers: int, rank: int) -> Algorithm:
    """Vectors from the servers of their rows, and gradients to them."""
    mine = [torch.zeros(len(rows), DIM) for rows in _asked(workers, rank)]
    theirs = [torch.zeros(len(_asked(workers, peer)[rank]), DIM) for peer in range(workers)]
    yield from pairwise_exchange(theirs, mine, rank)
    yield from pairwise_exchange([part.clone() for part in mine], [torch.empty_like(part) for part in theirs], rank)


def _ask(workers: int, rank: int) -> Algorithm:
    asked = _asked(workers, rank)
    yield from pairwise_exchange(asked, [torch.empty_like(_asked(workers, p)[rank]) for p in range(workers)], rank)


def _gather(dim: int, dtype: torch.dtype) -> _Make:
    """Something of each row of all batches, to all."""

    def make(workers: int, rank: int) -> Algorithm:
        parts = [torch.zeros(NUM_ROWS // _STRIDE * dim, dtype=dtype) for _ in range(workers)]
        yield from ring_all_gather(parts, rank)

    return make


def _nothing(workers: int, rank: int) -> Algorithm:
    yield from ()


_IDS = _gather(1, torch.int64)
_APPROACHES: dict[str, tuple[_Make, _Make]] = {
    "AlltoAll": (_columns, _IDS),
    "AllReduce": (_all_reduce, _nothing),
    "PS": (_pull_and_push, _ask),
    "AllGather": (_gather(DIM, torch.float32), _IDS),
}

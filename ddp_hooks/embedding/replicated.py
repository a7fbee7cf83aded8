"""Sparse gradients of tables that every rank keeps whole: partition the rows, sum up, and tell everybody.

Gloo's all-reduce of sparse tensors gathers every rank's rows on every rank, N - 1 times the gradient (Table 2 of the
paper, AllGather), each of which then adds all of them up. Here a row is summed up by one rank, the row's number modulo
the number of ranks, and only sums travel to everybody: a row that many ranks have travels once. (Two ranks exchange
their rows.)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks.comm import (
    Algorithm,
    Lanes,
    LaneSettings,
    Recorder,
    Round,
    Stall,
    Traffic,
    Work,
    agree,
    at_exit,
    bruck_all_gather,
    check_waits,
    pairwise_exchange,
    see,
    torch_compat,
)
from ddp_hooks.embedding.gradients import RowSum
from ddp_hooks.embedding.packing import as_rows, packed, packed_length, parts_of
from ddp_hooks.intercept.local_gradients import LocalGradients


@dataclass
class _Bucket:
    """A sparse bucket on its way."""

    gradient: Tensor
    future: torch.futures.Future[Tensor]
    work: Work
    result: list[Tensor]


class EmbeddingState:
    """The state of :func:`~ddp_hooks.embedding_hook`: sparse gradients of ``nn.Embedding(sparse=True)`` under DDP.

    The mean over ranks is DDP's own. Create it before the state for the dense gradients, if there is one, which then
    leaves the sparse ones alone::

        state = EmbeddingState(ddp)
        state.use_for_dense(dear_hook, DearState(ddp, optimizer))
        ddp.register_comm_hook(state, embedding_hook)

    Args:
        ddp: the model.
        timeout_s: a wait that takes longer fails.
        stall_warning_s: a wait that takes longer is logged, with what it waits for.

    Raises:
        ValueError: on every rank, if there is no sparse table, a limit is none, or ranks differ.

    Creating a state is collective: all ranks of the DDP module's group do it.
    """

    def __init__(
        self, ddp: DistributedDataParallel, *, timeout_s: float = 600.0, stall_warning_s: float = 60.0
    ) -> None:
        group = getattr(ddp, "process_group", None) or dist.group.WORLD
        assert group is not None, "torch.distributed is not initialised"
        problem = _find_problem(ddp, timeout_s, stall_warning_s)
        names = torch_compat.sparse_parameters(ddp) if problem is None else {}
        entries = {name: f"{tuple(p.shape)} {p.dtype}" for name, p in names.items()}
        settings = LaneSettings(timeout_s=timeout_s, stall_warning_s=stall_warning_s)
        agree(entries, problem, group, "the set-up of EmbeddingState", settings)
        self._names = {id(parameter): name for name, parameter in names.items()}
        device = next(iter(names.values())).device
        self._recorder = Recorder(False)
        self._lanes = Lanes(group, 1, device, settings, self._recorder)
        self._group = group
        self._stall = Stall()
        self._dense: Callable[[dist.GradBucket], torch.futures.Future[Tensor]] | None = None
        self._buckets: list[_Bucket] = []
        self._closed = False
        torch_compat.leave_to_another(ddp, set(names))
        self._handle = at_exit(self.close, self._lanes.abandon, self._is_stuck)
        self._ddp = weakref.ref(ddp)
        trained = torch_compat.managed_parameters(ddp) | names
        self._local: LocalGradients | None = None
        if self._lanes.world_size > 1:
            self._local = LocalGradients(ddp, list(trained.values()), list(trained), "EmbeddingState", "embedding_hook")

    def use_for_dense(self, hook: Callable[[Any, dist.GradBucket], Any], state: Any) -> None:
        """Reduce dense buckets with another hook, such as ``dear_hook`` or ``topk_hook``, instead of DDP's all-reduce.

        Args:
            hook: the hook.
            state: its state, made after this one.
        """
        self._dense = lambda bucket: hook(state, bucket)

    @property
    def traffic(self) -> Traffic:
        """Bytes and rounds so far, of sparse gradients."""
        return self._lanes.traffic

    @property
    def stall_s(self) -> float:
        """Seconds that ends of backwards have waited for sparse gradients so far."""
        return self._stall.seconds

    def reduce_bucket(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Start reducing a bucket; called by DDP, through the hook, during backward."""
        if self._closed:
            raise RuntimeError(
                "EmbeddingState was closed: wrap the model in a new DistributedDataParallel to train on"
                f"{see('the-state-was-closed')}"
            )
        if self._local is not None and bucket.is_last():
            self._local.all_reduced()
        buffer = bucket.buffer()
        if not buffer.is_sparse:
            return self._dense(bucket) if self._dense is not None else self._all_reduce(buffer)
        devices: list[int | str | torch.device] = [buffer.device] if buffer.device.type != "cpu" else []
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        name = self._names.get(id(bucket.parameters()[0]), "a table")
        result: list[Tensor] = []
        work = self._lanes.run(self._mean(buffer, result), f"sparse gradient of {name}")
        if not self._buckets:  # DDP's own callback, which waits for the future, will be queued after this one
            torch_compat.queue_engine_callback(self._end_backward)
        self._buckets.append(_Bucket(buffer, future, work, result))
        return future

    def close(self) -> None:
        """Finish communication, let every rank do the same, and end the lane. DDP cannot remove its hook."""
        if self._closed:
            return
        self._closed = True
        self._handle.remove()
        if self._local is not None:
            self._local.close()
        self._lanes.close()
        ddp = self._ddp()
        if ddp is not None:
            torch_compat.leave_to_another(ddp, set())

    def _end_backward(self) -> None:
        buckets, self._buckets = self._buckets, []
        for bucket in buckets:
            with self._stall.measure(self._recorder, bucket.work.label):
                bucket.work.wait()
            bucket.future.set_result(bucket.result[0])

    def _all_reduce(self, buffer: Tensor) -> torch.futures.Future[Tensor]:
        work = dist.all_reduce(buffer.div_(self._lanes.world_size), group=self._group, async_op=True)
        assert work is not None
        future = cast("torch.futures.Future[list[Tensor]]", work.get_future())
        return future.then(lambda done: done.value()[0])

    def _mean(self, gradient: Tensor, result: list[Tensor]) -> Algorithm:
        coalesced = gradient.coalesce()
        own = RowSum(coalesced.indices()[0], coalesced.values())
        rows, values = yield from mean_rows(own, self._lanes.rank, self._lanes.world_size)
        result.append(
            torch.sparse_coo_tensor(rows[None], values, gradient.shape, is_coalesced=True, check_invariants=False)
        )

    def _is_stuck(self) -> bool:
        return self._lanes.stuck

    def __deepcopy__(self, memo: Any) -> EmbeddingState:
        raise TypeError("a DDP module with EmbeddingState cannot be copied: the copy would lose its hook")

    def __reduce__(self) -> Any:
        raise TypeError("a DDP module with EmbeddingState cannot be pickled: save ddp.module.state_dict() instead")


def mean_rows(own: RowSum, rank: int, world_size: int) -> Generator[Round, None, RowSum]:
    """The mean over ranks of rows, on every rank; equal, bit for bit, on all of them.

    Args:
        own: this rank's; different rows, ascending.

    Returns:
        All rows that any rank has, ascending.
    """
    if world_size <= 2:  # one message each, instead of two of which the second may be as long
        return (yield from _mean_of_all_rows(own, rank, world_size))
    partial = yield from _mean_of_own_rows(own, rank, world_size)
    counts = yield from _all_numbers([len(partial.rows)], rank, world_size, own.rows.device)
    message = _pack(partial)
    sizes = [packed_length(_nbytes(partial, count)) for (count,) in counts]
    messages = yield from bruck_all_gather(message, sizes, range(world_size), rank)
    everything = [_unpack(part, count, partial) for part, (count,) in zip(messages, counts, strict=True)]
    rows = torch.cat([part.rows for part in everything])
    order = torch.argsort(rows)
    return RowSum(rows[order], torch.cat([part.values for part in everything]).index_select(0, order))


def _mean_of_all_rows(own: RowSum, rank: int, world_size: int) -> Generator[Round, None, RowSum]:
    """The mean over ranks, of which every rank gets all rows of all others."""
    counts = yield from _all_numbers([len(own.rows)], rank, world_size, own.rows.device)
    sizes = [packed_length(_nbytes(own, count)) for (count,) in counts]
    messages = yield from bruck_all_gather(_pack(own), sizes, range(world_size), rank)
    received = [_unpack(message, count, own) for message, (count,) in zip(messages, counts, strict=True)]
    return _mean(received, world_size)


def _mean_of_own_rows(own: RowSum, rank: int, world_size: int) -> Generator[Round, None, RowSum]:
    """The mean over ranks of the rows whose number modulo the number of ranks is this rank."""
    owner = own.rows % world_size
    parts = []
    for peer in range(world_size):
        chosen = (owner == peer).nonzero().view(-1)
        parts.append(RowSum(own.rows[chosen], own.values.index_select(0, chosen)))
    counts = yield from _all_numbers([len(part.rows) for part in parts], rank, world_size, own.rows.device)
    outgoing = [_pack(part) for part in parts]
    incoming = [packed(_nbytes(own, row[rank]), own.rows.device)[0] for row in counts]
    incoming[rank] = outgoing[rank]
    yield from pairwise_exchange(outgoing, incoming, rank)
    received = [_unpack(message, row[rank], own) for message, row in zip(incoming, counts, strict=True)]
    return _mean(received, world_size)


def _mean(received: Sequence[RowSum], world_size: int) -> RowSum:
    """The mean of everybody's rows, added up in the order of the ranks."""
    like = received[0].values
    rows = np.unique(np.concatenate([part.rows.cpu().numpy() for part in received]))
    total = torch.zeros(
        len(rows), *like.shape[1:], dtype=torch.promote_types(like.dtype, torch.float32), device=like.device
    )
    for part in received:
        places = torch.from_numpy(np.searchsorted(rows, part.rows.cpu().numpy())).to(total.device)
        total.index_add_(0, places, part.values.to(total.dtype))
    total.div_(world_size)  # before rounding: a sum of 16-bit numbers may be out of their range
    return RowSum(torch.from_numpy(rows).to(total.device), total.to(like.dtype))


def _all_numbers(
    mine: list[int], rank: int, world_size: int, device: torch.device
) -> Generator[Round, None, list[list[int]]]:
    message = torch.tensor(mine, dtype=torch.int64, device=device)  # where the lane's backend can take it from
    gathered = yield from bruck_all_gather(message, [len(mine)] * world_size, range(world_size), rank)
    return [numbers.tolist() for numbers in gathered]


def _nbytes(like: RowSum, count: int) -> list[int]:
    columns = like.values.shape[1]
    return [count * columns * like.values.element_size(), count * like.rows.element_size()]


def _pack(part: RowSum) -> Tensor:
    num_rows, columns = part.values.shape
    message, (values, rows) = packed(_nbytes(part, num_rows), part.values.device)
    as_rows(values, num_rows, columns, part.values.dtype).copy_(part.values)
    rows.view(part.rows.dtype).copy_(part.rows)
    return message


def _unpack(message: Tensor, count: int, like: RowSum) -> RowSum:
    values, rows = parts_of(message, _nbytes(like, count))
    return RowSum(rows.view(like.rows.dtype), as_rows(values, count, like.values.shape[1], like.values.dtype))


def _find_problem(ddp: Any, timeout_s: object, stall_warning_s: object) -> str | None:
    if not isinstance(ddp, DistributedDataParallel):
        return f"EmbeddingState needs a DistributedDataParallel module, got {type(ddp).__name__}: wrap the model first"
    if torch_compat.comm_hook_registered(ddp):
        return (
            "the DDP module already has a communication hook, and takes only one: drop one of the two. To replace a "
            "state, close() it, and wrap the model again"
        )
    changed = torch_compat.problem_of_reduced_set(ddp, "EmbeddingState")
    if changed is not None:
        return changed
    if not torch_compat.sparse_parameters(ddp):
        return (
            "the model has no sparse table: construct embeddings with nn.Embedding(..., sparse=True), or split them "
            "with shard_embeddings(), which needs no hook"
        )
    try:
        check_waits(timeout_s, stall_warning_s)
    except ValueError as error:
        return str(error)
    return None

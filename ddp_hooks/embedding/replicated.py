"""Sparse gradients of tables that every rank keeps whole: partition the rows, sum them up, and send the sums to all.

Gloo sends every rank's rows to every rank. Here the rank ``row % N`` adds up a row, and only sums travel to all ranks.

No ``from __future__ import annotations`` here: DDP compares the hook's annotations by identity.
"""

import weakref
from collections.abc import Callable, Generator, Sequence
from typing import Any, cast

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
    see,
    wrong_state,
)
from ddp_hooks.comm.torch_compat.autograd import queue_engine_callback
from ddp_hooks.comm.torch_compat.ddp import (
    comm_hook_registered,
    leave_to_another,
    managed_parameters,
    problem_of_reduced_set,
    sparse_parameters,
)
from ddp_hooks.embedding.exchange.gradients import RowSum, mean_of_rows
from ddp_hooks.embedding.exchange.lookup import as_rows, exchange_parts, message_bytes, new_message, parts_of
from ddp_hooks.intercept.causes import LocalGradients


class EmbeddingState:
    """The state of :func:`~ddp_hooks.embedding_hook`: sparse gradients of ``nn.Embedding(sparse=True)`` under DDP.

    The result is DDP's mean over ranks. Create this state before the state for dense gradients, if there is one, which
    then leaves sparse gradients alone::

        state = EmbeddingState(ddp)
        state.use_for_dense(dear_hook, DearState(ddp, optimizer))
        ddp.register_comm_hook(state, embedding_hook)

    Args:
        ddp: the model.
        timeout_s: a wait that takes longer fails.
        stall_warning_s: a wait that takes longer is logged, with the gradient that it waits for.

    Raises:
        ValueError: on every rank: no table is sparse, a limit is invalid, or ranks differ.
        LaneError, LaneTimeout: some rank did not create its state; creation is collective over the DDP module's group.
    """

    def __init__(
        self, ddp: DistributedDataParallel, *, timeout_s: float = 600.0, stall_warning_s: float = 60.0
    ) -> None:
        group = getattr(ddp, "process_group", None) or dist.group.WORLD
        assert group is not None, "torch.distributed is not initialised"
        problem = _find_problem(ddp, timeout_s, stall_warning_s)
        names = sparse_parameters(ddp) if problem is None else {}
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
        # Work, and what DDP waits for and gets, of sparse buckets on their way.
        self._buckets: list[tuple[Work, torch.futures.Future[Tensor], list[Tensor]]] = []
        self._closed = False
        leave_to_another(ddp, set(names))
        self._handle = at_exit(self.close, self._lanes.abandon, self._is_stuck)
        self._ddp = weakref.ref(ddp)
        trained = managed_parameters(ddp) | names
        self._local: LocalGradients | None = None
        if self._lanes.world_size > 1:
            self._local = LocalGradients(ddp, list(trained.values()), list(trained), "EmbeddingState", "embedding_hook")

    def use_for_dense(self, hook: Callable[[Any, dist.GradBucket], Any], state: Any) -> None:
        """Reduce dense buckets with another hook, such as ``dear_hook`` or ``topk_hook``, instead of DDP's all-reduce.

        ``state`` is the hook's, made after this one.
        """
        self._dense = lambda bucket: hook(state, bucket)

    @property
    def traffic(self) -> Traffic:
        """Bytes and rounds of sparse gradients so far."""
        return self._lanes.traffic

    @property
    def stall_s(self) -> float:
        """Seconds that ends of backwards have waited for sparse gradients so far."""
        return self._stall.seconds

    def reduce_bucket(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Start reducing a bucket; the backward raises ``LaneError`` or ``LaneTimeout`` at its end."""
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
            queue_engine_callback(self._end_backward)
        self._buckets.append((work, future, result))
        return future

    def close(self) -> None:
        """Finish communication and end the lane; every rank does the same. DDP cannot remove its hook."""
        if self._closed:
            return
        self._closed = True
        self._handle.remove()
        if self._local is not None:
            self._local.close()
        self._lanes.close()
        if (ddp := self._ddp()) is not None:
            leave_to_another(ddp, set())

    def _end_backward(self) -> None:
        buckets, self._buckets = self._buckets, []
        for work, future, result in buckets:
            with self._stall.measure(self._recorder, work.label):
                work.wait()
            future.set_result(result[0])

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

    def __reduce__(self) -> Any:
        raise TypeError(
            "a DDP module with EmbeddingState cannot be copied or pickled: the copy would lose its hook. "
            "Copy ddp.module, or save ddp.module.state_dict()"
        )


def embedding_hook(state: EmbeddingState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Reduce a sparse gradient by partition and exchange, a dense one as ``state`` says.

    Usage: ``ddp.register_comm_hook(EmbeddingState(ddp), embedding_hook)``.
    """
    if not isinstance(state, EmbeddingState):
        raise wrong_state("embedding_hook", "EmbeddingState(ddp)", state)
    return state.reduce_bucket(bucket)


def mean_rows(own: RowSum, rank: int, world_size: int) -> Generator[Round, None, RowSum]:
    """Return the mean over ranks of all rows that any rank has, ascending; the same bits on every rank."""
    if world_size <= 2:  # one message each, in place of two
        return _mean((yield from _all_gather(own, rank, world_size)))
    partial = yield from _mean_of_own_rows(own, rank, world_size)
    gathered = yield from _all_gather(partial, rank, world_size)
    rows = torch.cat([part.rows for part in gathered])
    order = torch.argsort(rows)
    return RowSum(rows[order], torch.cat([part.values for part in gathered]).index_select(0, order))


def _mean_of_own_rows(own: RowSum, rank: int, world_size: int) -> Generator[Round, None, RowSum]:
    owner = own.rows % world_size
    parts = []
    for peer in range(world_size):
        mine = (owner == peer).nonzero().view(-1)
        parts.append(RowSum(own.rows[mine], own.values.index_select(0, mine)))
    counts = yield from _all_gather_counts([len(part.rows) for part in parts], rank, world_size, own.rows.device)
    received = yield from exchange_parts(
        rank,
        world_size,
        own.rows.device,
        nbytes=lambda sender, receiver: _nbytes(own, counts[sender][receiver]),
        write=lambda receiver, slots: _write(parts[receiver], slots),
    )
    return _mean([_read(slots, row[rank], own) for slots, row in zip(received, counts, strict=True)])


def _mean(received: Sequence[RowSum]) -> RowSum:
    return mean_of_rows([part.rows.cpu().numpy() for part in received], [part.values for part in received])


def _all_gather(own: RowSum, rank: int, world_size: int) -> Generator[Round, None, list[RowSum]]:
    counts = [row[0] for row in (yield from _all_gather_counts([len(own.rows)], rank, world_size, own.rows.device))]
    message, slots = new_message(_nbytes(own, len(own.rows)), own.rows.device)
    _write(own, slots)
    sizes = [message_bytes(_nbytes(own, count)) for count in counts]
    messages = yield from bruck_all_gather(message, sizes, range(world_size), rank)
    found = zip(messages, counts, strict=True)
    return [_read(parts_of(message, _nbytes(own, count)), count, own) for message, count in found]


def _all_gather_counts(
    mine: list[int], rank: int, world_size: int, device: torch.device
) -> Generator[Round, None, list[list[int]]]:
    message = torch.tensor(mine, dtype=torch.int64, device=device)  # the lane's backend takes it from there
    gathered = yield from bruck_all_gather(message, [len(mine)] * world_size, range(world_size), rank)
    return [numbers.tolist() for numbers in gathered]


def _nbytes(like: RowSum, count: int) -> list[int]:
    num_columns = like.values.shape[1]
    return [count * num_columns * like.values.element_size(), count * like.rows.element_size()]


def _write(part: RowSum, slots: Sequence[Tensor]) -> None:
    as_rows(slots[0], len(part.rows), part.values.shape[1], part.values.dtype).copy_(part.values)
    slots[1].view(part.rows.dtype).copy_(part.rows)


def _read(slots: Sequence[Tensor], count: int, like: RowSum) -> RowSum:
    values = as_rows(slots[0], count, like.values.shape[1], like.values.dtype)
    return RowSum(slots[1].view(like.rows.dtype), values)


def _find_problem(ddp: Any, timeout_s: object, stall_warning_s: object) -> str | None:
    if not isinstance(ddp, DistributedDataParallel):
        return f"EmbeddingState needs a DistributedDataParallel module, got {type(ddp).__name__}: wrap the model first"
    if comm_hook_registered(ddp):
        return (
            "the DDP module already has a communication hook, and takes only one: drop one of the two. To replace a "
            "state, close() it, and wrap the model again"
        )
    if (changed := problem_of_reduced_set(ddp, "EmbeddingState")) is not None:
        return changed
    if not sparse_parameters(ddp):
        return (
            "the model has no sparse table: construct embeddings with nn.Embedding(..., sparse=True), or split them "
            "with shard_embeddings(), which needs no hook"
        )
    try:
        check_waits(timeout_s, stall_warning_s)
    except ValueError as error:
        return str(error)
    return None

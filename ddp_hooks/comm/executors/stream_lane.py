"""A lane for NCCL: a CUDA stream that runs native collectives."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_hooks.comm.accounting import Recorder, Traffic
from ddp_hooks.comm.algorithms.collectives import Partition
from ddp_hooks.comm.algorithms.exchange import Algorithm, Recv, Round
from ddp_hooks.comm.executors.work import StreamWork, Work
from ddp_hooks.comm.torch_compat.distributed import all_gather_single, reduce_scatter_single


class StreamLane:
    """Lane for NCCL: one stream, one process group, native collectives in place on equal ranges.

    Elements that do not divide evenly travel together, in one small all-reduce or broadcast. The stream verbs do
    nothing on CPU tensors, so the same code is tested on gloo. One rank calls no collective.
    """

    def __init__(self, index: int, group: dist.ProcessGroup, device: torch.device, recorder: Recorder) -> None:
        self.traffic = Traffic()
        self._index = index
        self._group = group
        self._rank = dist.get_rank(group)
        self._world_size = dist.get_world_size(group)
        self._device = device
        self._recorder = recorder
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def reduce_scatter(self, partitions: Sequence[Partition], label: str, divisor: int = 1) -> Work:
        """Run native reduce-scatters, and one all-reduce of elements left over; see :class:`~.lane.Lane`."""
        with _StreamOrder(self._stream) as order:  # gradients were written on the current stream
            for flat, bounds in partitions:
                body, own = self._body(flat, bounds)
                if own.numel() and self._world_size > 1:
                    reduce_scatter_single(own, body, self._group)
                    if divisor > 1:
                        own.div_(divisor)
            tails = self._tails(partitions)
            if tails:
                joined = torch.cat(tails)
                dist.all_reduce(joined, group=self._group)
                _split_back(joined.div_(divisor) if divisor > 1 else joined, tails)
        self._count(partitions)
        return StreamWork(f"reduce-scatter of {label}", order.event, self._device)

    def all_gather(self, partitions: Sequence[Partition], label: str, after: Collection[Work] = ()) -> Work:
        """Run native all-gathers, and one broadcast of elements left over; see :class:`~.lane.Lane`."""
        with _StreamOrder(self._stream) as order:  # parameters were written on the current stream
            for work in after:
                work.wait()
            for flat, bounds in partitions:
                body, own = self._body(flat, bounds)
                if own.numel() and self._world_size > 1:
                    all_gather_single(body, own, self._group)
            tails = self._tails(partitions)
            if tails:
                joined = torch.cat(tails)
                last = dist.get_global_rank(self._group, self._world_size - 1)
                dist.broadcast(joined, src=last, group=self._group)
                _split_back(joined, tails)
        self._count(partitions)
        return StreamWork(f"all-gather of {label}", order.event, self._device)

    def run(self, algorithm: Algorithm, label: str, after: Collection[Work] = (), tag: int | None = None) -> Work:
        """Run ``algorithm`` as batches of point-to-point messages, which have no tags; see :class:`~.lane.Lane`."""
        with _StreamOrder(self._stream) as order:
            for work in after:
                work.wait()
            for next_round in algorithm:
                operations = [
                    dist.P2POp(
                        dist.irecv if isinstance(exchange, Recv) else dist.isend,
                        exchange.tensor,
                        group=self._group,
                        group_peer=exchange.peer,
                    )
                    for exchange in next_round
                ]
                for request in dist.batch_isend_irecv(operations) if operations else []:
                    request.wait()
                self._count_round(next_round)
        return StreamWork(f"exchange of {label}", order.event, self._device)

    def all_reduce(self, value: Tensor, op: dist.ReduceOp.RedOpType, label: str) -> Work:
        """Reduce a few numbers natively, in place."""
        with _StreamOrder(self._stream) as order:
            if self._world_size > 1:
                dist.all_reduce(value, op, group=self._group)
        return StreamWork(f"sum of {label}", order.event, self._device)

    @property
    def is_idle(self) -> bool:
        """True if nothing is under way on the stream."""
        return self._stream is None or self._stream.query()

    def close(self, unfinished: bool = False) -> None:
        """Do nothing: a stream has no thread to end; see :attr:`is_idle`."""

    def _body(self, flat: Tensor, bounds: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        share = bounds[1] - bounds[0] if self._world_size > 1 else flat.numel()
        return flat[: share * self._world_size], flat[share * self._rank : share * (self._rank + 1)]

    def _tails(self, partitions: Sequence[Partition]) -> list[Tensor]:
        if self._world_size == 1:
            return []
        tails = [flat[bounds[1] * self._world_size :] for flat, bounds in partitions]
        return [tail for tail in tails if tail.numel()]

    def _count_round(self, exchanges: Round) -> None:
        for exchange in exchanges:
            if isinstance(exchange, Recv):
                self.traffic.received_bytes += exchange.tensor.nbytes
            else:
                self.traffic.sent_bytes += exchange.tensor.nbytes
        self.traffic.rounds += 1

    def _count(self, partitions: Sequence[Partition]) -> None:
        nbytes = sum(partition.nbytes for partition in partitions)
        others = self._world_size - 1
        self.traffic.sent_bytes += nbytes * others // self._world_size
        self.traffic.received_bytes += nbytes * others // self._world_size
        self.traffic.rounds += others


def _split_back(joined: Tensor, parts: Sequence[Tensor]) -> None:
    for part, values in zip(parts, joined.split([part.numel() for part in parts]), strict=True):
        part.copy_(values)


class _StreamOrder:
    """Run on ``stream`` what follows the current stream's work; ``event`` marks the end. Does nothing on CPU."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._context = torch.cuda.stream(stream) if stream is not None else None
        self._stream = stream
        self.event: torch.cuda.Event | None = None

    def __enter__(self) -> _StreamOrder:
        if self._stream is not None and self._context is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            self._context.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._stream is not None and self._context is not None:
            self.event = self._stream.record_event()
            self._context.__exit__(*exception)

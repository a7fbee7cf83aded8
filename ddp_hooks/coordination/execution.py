"""What was agreed upon is submitted to lanes: all-reduces that are fused, and all else by itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ddp_hooks.comm import Algorithm, Lanes, Partition, Work, aligned_bounds, without_messages
from ddp_hooks.comm.executors.lanes import Lane
from ddp_hooks.coordination.collectives import all_gather_rows, all_to_all_rows, broadcast
from ddp_hooks.coordination.handle import Agreement
from ddp_hooks.coordination.release import Message
from ddp_hooks.coordination.request import Request


@dataclass
class Submission:
    """A request with its tensors, on the rank that made it.

    Args:
        request: what other ranks are told.
        tensors: changed in place by all-reduces and broadcasts.
        agreement: that callers wait for.
        splits: of an all-to-all, numbers of rows by rank.
        flags: of a request for ``"any"``.
        algorithm: of an exchange.
        result: what came of it, where that is no tensor of the caller's.
        began_s, asked_s, agreed_s, started_s, ended_s: in seconds of ``time.perf_counter()``.
        warned_s: when it was last said who is missing.
    """

    request: Request
    tensors: list[Tensor]
    agreement: Agreement
    splits: list[int] = field(default_factory=list)
    flags: int = 0
    algorithm: Algorithm | None = None
    result: Any = None
    began_s: float = 0.0
    asked_s: float = 0.0
    agreed_s: float = 0.0
    started_s: float = 0.0
    ended_s: float = 0.0
    warned_s: float = 0.0


class Execution:
    """Submits to lanes; on one thread, in the order that all ranks have agreed upon.

    Args:
        lanes: that carry everything.
        device: of tensors that stand in where this rank has none.
        when_done: told of every message's number and submissions when they have ended, on a lane's thread.
    """

    def __init__(self, lanes: Lanes, device: torch.device, when_done: Callable[[int, list[Submission]], None]) -> None:
        self._lanes = lanes
        self._device = device
        self._when_done = when_done

    def start(self, message: Message, mine: Sequence[Submission | None]) -> Work:
        """Move one message, with this rank's submissions or None where it has none."""
        requests = message.requests
        submissions = [each for each in mine if each is not None]
        label = ", ".join(request.name for request in requests[:3]) + (", …" if len(requests) > 3 else "")
        lane = self._lanes.next_lane()
        lane.run(without_messages(lambda: _note_start(submissions)), label)
        divisor = self._lanes.world_size if requests[0].mean else 1
        if requests[0].operation == "all_reduce":
            tensors = [t for request, each in zip(requests, mine, strict=True) for t in self._tensors(request, each)]
            self._all_reduce(lane, tensors, divisor, label)
        elif requests[0].operation == "reduce_scatter":
            self._reduce_scatter(lane, submissions[0], divisor, label)
        else:
            lane.run(self._algorithm(submissions[0]), label)
        return lane.run(without_messages(lambda: self._finish(message.number, submissions)), label)

    def _tensors(self, request: Request, submission: Submission | None) -> list[Tensor]:
        if submission is not None:
            return submission.tensors
        return [torch.zeros(spec.shape, dtype=spec.torch_dtype, device=self._device) for spec in request.tensors]

    def _all_reduce(self, lane: Lane, tensors: Sequence[Tensor], divisor: int, label: str) -> None:
        """Reduce-scatter and all-gather, in place where one tensor lies in one piece, else in a copy."""
        in_place = len(tensors) == 1 and tensors[0].is_contiguous()
        flat = tensors[0].view(-1) if in_place else tensors[0].new_empty(sum(map(Tensor.numel, tensors)))
        parts = [part.view(t.shape) for part, t in zip(flat.split([t.numel() for t in tensors]), tensors, strict=True)]
        partition = Partition(flat, aligned_bounds(flat.numel(), self._lanes.world_size, flat.element_size()))
        # Submitted in any case: another rank's tensor may lie otherwise, and a lane's tags count what was submitted.
        lane.run(without_messages(lambda: None if in_place else _copy(parts, tensors)), label)
        lane.reduce_scatter([partition], label, divisor)
        lane.all_gather([partition], label)
        lane.run(without_messages(lambda: None if in_place else _copy(tensors, parts)), label)

    def _reduce_scatter(self, lane: Lane, submission: Submission, divisor: int, label: str) -> None:
        """In a copy: the caller's tensor stays as it is."""
        (tensor,), world_size = submission.tensors, self._lanes.world_size
        rows = tensor.clone(memory_format=torch.contiguous_format)
        share = rows.numel() // world_size
        partition = Partition(rows.view(-1), tuple(share * rank for rank in range(world_size + 1)))
        submission.result = (rows.chunk(world_size)[self._lanes.rank],)
        lane.reduce_scatter([partition], label, divisor)

    def _algorithm(self, submission: Submission) -> Algorithm:
        rank, world_size = self._lanes.rank, self._lanes.world_size
        request = submission.request
        if request.operation == "exchange":
            assert submission.algorithm is not None
            return submission.algorithm
        (tensor,) = submission.tensors

        def keep(*result: Any) -> None:
            submission.result = result

        if request.operation == "broadcast":
            return broadcast(tensor, rank, world_size, request.root)
        if request.operation == "all_gather":
            return all_gather_rows(tensor, rank, world_size, keep)
        if request.operation == "all_to_all":
            return all_to_all_rows(tensor, submission.splits, rank, world_size, keep)
        raise AssertionError(request.operation)

    def _finish(self, number: int, submissions: list[Submission]) -> None:
        now_s = time.perf_counter()
        for submission in submissions:
            submission.ended_s = now_s
        self._when_done(number, submissions)


def _note_start(submissions: Sequence[Submission]) -> None:
    now_s = time.perf_counter()
    for submission in submissions:
        submission.started_s = now_s


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    torch._foreach_copy_(list(targets), list(sources))

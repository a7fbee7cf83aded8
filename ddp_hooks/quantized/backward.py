"""One backward in fewer bits: from DDP's buckets to lanes and back."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ddp_hooks.comm import (
    Algorithm,
    Lanes,
    Nodes,
    Partition,
    Recorder,
    Residuals,
    Stall,
    Work,
    aligned_bounds,
    bruck_all_gather,
)
from ddp_hooks.comm.executors.slices import scatter_message_bytes
from ddp_hooks.quantized.config import QuantizedConfig
from ddp_hooks.quantized.exchange import Exchange

_SLICE_BYTES = 1 << 20
_WHOLE_NUMEL = 1 << 31  # on accelerators, where streams need no slices

Run: TypeAlias = tuple[int, ...]
"""Parameters, by index, whose gradients travel one after the other."""


@dataclass
class Context:
    """Settings, model and lanes that all backwards of one state share."""

    config: QuantizedConfig
    parameters: list[torch.nn.Parameter]  # reduced by DDP, in a fixed order
    names: list[str]  # of the parameters
    residuals: Residuals
    lanes: Lanes
    nodes: Nodes
    recorder: Recorder
    stall: Stall = field(default_factory=Stall)  # time that training has waited for the lanes

    def wait(self, work: Work) -> None:
        if not work.done:
            with self.stall.measure(self.recorder, work.label):
                work.wait()


class _Unused(NamedTuple):
    """Memory of a parameter that this rank has not used, as it was before the exchange."""

    gradient: Tensor
    residual: Tensor | None  # None: it travels as it is


@dataclass
class Backward:
    """A synchronised backward; its buckets belong to the lanes until :meth:`wait_all` has returned.

    ``runs`` travel in this order; None: every bucket is one.
    """

    context: Context
    runs: list[Run] | None
    former: Collection[Run]  # of the backward before
    used: Collection[int] | None  # parameters that this rank has used, filled meanwhile; None: all are used
    measures: bool  # relative errors of rounding
    buffers: list[Tensor] = field(default_factory=list)  # of the buckets
    futures: list[torch.futures.Future[Tensor]] = field(default_factory=list)
    submitted: list[Run] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    _parts: dict[int, Tensor] = field(default_factory=dict)  # parameter -> its part of a bucket, (numel,)
    _copies: list[tuple[Run, Tensor]] = field(default_factory=list)  # runs that are no bucket
    _unused: dict[int, _Unused] = field(default_factory=dict)
    _used_by_anybody: list[bool] = field(default_factory=list)
    _works: list[Work] = field(default_factory=list)

    @property
    def missing(self) -> list[str]:
        """Names of parameters that DDP has not handed over yet."""
        return [name for index, name in enumerate(self.context.names) if index not in self._parts]

    def add_bucket(self, indices: Run, buffer: Tensor, future: torch.futures.Future[Tensor]) -> None:
        """Submit what is ready with this bucket, of the parameters ``indices``."""
        context = self.context
        self.buffers.append(buffer)
        self.futures.append(future)
        sizes = [context.parameters[index].numel() for index in indices]
        self._parts |= zip(indices, buffer.split(sizes), strict=True)
        if self.runs is None:
            self._submit(indices, buffer)
        else:
            for run in self.runs[len(self.submitted) :]:
                if any(index not in self._parts for index in run):
                    break
                flat = torch.cat([self._parts[index] for index in run])
                self._copies.append((run, flat))
                self._submit(run, flat)
        if self.used is not None and not self.missing:
            used = [index in self.used for index in range(len(context.parameters))]
            self._works.append(context.lanes.run(self._exchange_used(used), "which parameters were used"))

    def _submit(self, run: Run, flat: Tensor) -> None:
        context, lanes = self.context, self.context.lanes
        codec = context.config.codec_for(flat.dtype) if lanes.world_size > 1 else None
        residual = context.residuals.of_bucket(run) if codec is not None else None
        self._keep_unused(run, residual)
        self.submitted.append(run)
        name = context.names[run[0]] + (f" and {len(run) - 1} more" if len(run) > 1 else "")
        if codec is None or residual is None:
            lane = lanes.next_lane()  # the same one, so that the gather follows the sum
            partitions = [Partition(flat, aligned_bounds(flat.numel(), lanes.world_size, flat.element_size()))]
            lane.reduce_scatter(partitions, name, lanes.world_size)
            self._works.append(lane.all_gather(partitions, name))
            return
        is_new = run not in self.former
        exchange = Exchange(name, flat, residual, codec, context.nodes, is_new, self.measures)
        self.exchanges.append(exchange)
        message_bytes = scatter_message_bytes(_SLICE_BYTES, lanes.world_size - 1)
        numel = max(1, message_bytes // codec.nbytes(codec.block)) * codec.block
        self._works.append(lanes.run_in_turn(exchange.slices(_WHOLE_NUMEL if lanes.native else numel), name))

    def _keep_unused(self, run: Run, residual: Tensor | None) -> None:
        unused = [index for index in run if index not in self.used] if self.used is not None else []
        views = self.context.residuals.by_parameter() if unused and residual is not None else {}
        for index in unused:
            kept = views[index].clone() if residual is not None else None
            self._unused[index] = _Unused(self._parts[index].clone(), kept)

    def _exchange_used(self, used: Sequence[bool]) -> Algorithm:
        mine = torch.tensor(used, dtype=torch.uint8, device=self.buffers[0].device)
        lanes = self.context.lanes
        ranks = range(lanes.world_size)
        flags = yield from bruck_all_gather(mine, [mine.numel()] * len(ranks), ranks, lanes.rank)
        self._used_by_anybody = torch.stack(flags).any(0).tolist()

    def wait_all(self) -> None:
        """Wait for everything. DDP leaves the gradients of parameters alone that no rank has used, and so do we."""
        for work in self._works:
            self.context.wait(work)
        for run, flat in self._copies:
            sizes = [self._parts[index].numel() for index in run]
            for index, part in zip(run, flat.split(sizes), strict=True):
                self._parts[index].copy_(part)
        views = self.context.residuals.by_parameter() if self._unused else {}
        for index, before in self._unused.items():
            if not self._used_by_anybody[index]:
                self._parts[index].copy_(before.gradient)
                if before.residual is not None:
                    views[index].copy_(before.residual)

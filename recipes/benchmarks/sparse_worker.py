"""Work of one worker of the sparse all-reduce benchmark."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from ddp_hooks.comm import Algorithm, Lanes, LaneSettings, Partition, Recorder, Recv, Round, Send, aligned_bounds
from ddp_hooks.sparse import SparseSum, Sparsity
from ddp_hooks.sparse.codec import EntryCodec
from ddp_hooks.sparse.oktopk import OkTopkEstimates
from recipes.benchmarks.harness.worker import report, slowest
from recipes.benchmarks.sparse_allreduce import SparseJob, is_sparse, settings_of

MATRIX_ROWS = 1000  # the gradient is made of matrices of so many rows and columns, for PowerSGD


@dataclass
class Timing:
    """One run, on this rank.

    Args:
        total_s: from the gradient to the mean of what was kept of all of them.
        compute_s: of that, what this rank's algorithm computed between its rounds.
        exchange_s: the same messages once more, with nothing to compute between them.
        sent_bytes: payload.
    """

    total_s: float
    compute_s: float = 0.0
    exchange_s: float = 0.0
    sent_bytes: float = 0.0


@dataclass
class Recording:
    """The messages of a run, and the time between them."""

    rounds: list[list[tuple[bool, int, int]]] = field(default_factory=list)  # (is a receive, peer, bytes)
    compute_s: float = 0.0

    def of(self, algorithm: Algorithm) -> Algorithm:
        """Run ``algorithm`` and note what it does."""
        while True:
            start_s = time.perf_counter()
            exchanges = next(algorithm, None)
            self.compute_s += time.perf_counter() - start_s
            if exchanges is None:
                return
            exchanges = list(exchanges)
            self.rounds.append([(isinstance(e, Recv), e.peer, e.tensor.nbytes) for e in exchanges])
            yield exchanges

    def again(self) -> Algorithm:
        """The same messages, from and to memory that is already there."""
        prepared: list[Round] = [
            [
                (Recv if receives else Send)(peer, torch.zeros(nbytes, dtype=torch.uint8))
                for receives, peer, nbytes in exchanges
            ]
            for exchanges in self.rounds
        ]
        return iter_rounds(prepared)

    @property
    def sent_bytes(self) -> int:
        return sum(nbytes for exchanges in self.rounds for receives, _, nbytes in exchanges if not receives)


def iter_rounds(rounds: Iterable[Round]) -> Algorithm:
    yield from rounds


class WholeBucket:
    """What DDP's hooks want of a bucket that holds the whole gradient."""

    def __init__(self, flat: Tensor) -> None:
        self._flat = flat
        side = MATRIX_ROWS * MATRIX_ROWS
        self._matrices = [part.view(MATRIX_ROWS, -1) if part.numel() == side else part for part in flat.split(side)]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True

    def buffer(self) -> Tensor:
        return self._flat

    def gradients(self) -> list[Tensor]:
        return self._matrices

    def parameters(self) -> list[Tensor]:
        return self._matrices

    def set_buffer(self, flat: Tensor) -> None:
        self._flat = flat


def compare(job: SparseJob) -> list[dict[str, Any]]:
    """Run every variant once per round, so that slow phases of the machine hit all of them alike."""
    settings = LaneSettings(timeout_s=300)
    lanes = Lanes(dist.GroupMember.WORLD or dist.group.WORLD, 1, torch.device("cpu"), settings, Recorder(False))  # type: ignore[arg-type]
    rows = [row for numel in job.numels for row in compare_length(job, numel, lanes)]
    lanes.close()
    return rows


def compare_length(job: SparseJob, numel: int, lanes: Lanes) -> list[dict[str, Any]]:
    """One row per variant, density and round."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    gradient = torch.randn(numel, generator=generator)
    gradient.mul_(torch.randn(numel, generator=generator).abs_())  # heavier tails, as gradients have them
    bench = Bench(gradient, lanes)
    cases = [(name, 1.0) for name in job.variants if not is_sparse(name)]
    cases += [(name, density) for density in job.densities for name in job.variants if is_sparse(name)]
    runs: dict[tuple[str, float], Callable[[], Timing]] = {
        (name, density): bench.variant(name, density, job.wire) for name, density in cases
    }
    rows = []
    for round_index in range(job.rounds + 1):  # the first one warms up
        for (name, density), once in runs.items():
            dist.barrier()
            timing = once()
            *times_s, sent_bytes = slowest(*astuple(timing))
            gc.collect()
            if round_index:
                row = dict(zip(("total_s", "compute_s", "exchange_s"), times_s, strict=True))
                rows.append({"name": name, "numel": numel, "density": density, "sent_bytes": sent_bytes, **row})
                report(f"{numel / 1e6:g} M, {name} {density:g}, round {round_index}/{job.rounds}: {times_s[0]:.3f} s")
    return rows


class Bench:
    """Runs variants on copies of one gradient.

    Args:
        gradient: (n,), of this rank.
        lanes: one lane.
    """

    def __init__(self, gradient: Tensor, lanes: Lanes) -> None:
        self._gradient = gradient
        self._flat = torch.zeros_like(gradient)  # what a variant may change
        self._mean = torch.zeros_like(gradient)  # memory that has been touched, as DDP's buckets
        self._lanes = lanes
        self._world_size = dist.get_world_size()

    def variant(self, name: str, density: float, wire: str) -> Callable[[], Timing]:
        """A function that runs it once."""
        if is_sparse(name):
            k = max(1, round(density * self._gradient.numel()))
            sparsity = Sparsity(k=k, codec=EntryCodec(wire, torch.float32), **settings_of(name))  # type: ignore[arg-type]
            rank = dist.get_rank()
            summation = SparseSum(sparsity, self._gradient.numel(), rank, self._world_size)
            if isinstance(summation.memory, OkTopkEstimates):
                return lambda: self._over_interval(summation)
            return lambda: self._sparse(summation)
        if name == "dense":
            return self._dense
        ring_bytes = 2 * self._gradient.nbytes * (self._world_size - 1) / self._world_size
        if name == "powersgd-4":
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
            state.iter = 2  # from the first run on
            return lambda: self._hook(partial(powerSGD_hook.powerSGD_hook, state), 0.0)
        if name == "bf16":
            return lambda: self._hook(partial(default_hooks.bf16_compress_hook, self._lanes.group), ring_bytes / 2)
        return lambda: self._hook(partial(default_hooks.allreduce_hook, self._lanes.group), ring_bytes)

    def _hook(self, hook: Callable[[Any], Any], sent_bytes: float) -> Timing:
        """A hook of torch's."""
        self._flat.copy_(self._gradient)
        dist.barrier()
        start_s = time.perf_counter()
        hook(WholeBucket(self._flat)).wait()
        total_s = time.perf_counter() - start_s
        return Timing(total_s, exchange_s=total_s, sent_bytes=sent_bytes)

    def _dense(self) -> Timing:
        """Ours, without anything left out."""
        self._flat.copy_(self._gradient)
        partition = Partition(self._flat, aligned_bounds(self._flat.numel(), self._world_size, 4))
        dist.barrier()
        start_s, before = time.perf_counter(), self._lanes.traffic
        self._lanes.reduce_scatter([partition], "all of it", self._world_size)
        self._lanes.all_gather([partition], "all of it").wait()
        total_s = time.perf_counter() - start_s
        sent_bytes = (self._lanes.traffic - before).sent_bytes
        return Timing(total_s, exchange_s=total_s, sent_bytes=sent_bytes)

    def _over_interval(self, summation: SparseSum) -> Timing:
        """A mean step of Ok-Topk: one in which it estimates its thresholds, and the others until it does so again."""
        assert isinstance(summation.memory, OkTopkEstimates)
        summation.memory.step = 0
        estimating, others = self._sparse(summation), self._sparse(summation)
        part = 1.0 / summation.memory.threshold_interval
        means = [part * a + (1.0 - part) * b for a, b in zip(astuple(estimating), astuple(others), strict=True)]
        return Timing(*means)

    def _sparse(self, summation: SparseSum) -> Timing:
        """Ours: residual plus gradient, selection, exchange, and the mean as a dense vector."""
        self._flat.zero_()  # the residual
        mean = self._mean
        recording = Recording()

        def exchange() -> Algorithm:
            result = yield from summation.run(self._flat, self._gradient)
            mean.zero_().index_copy_(0, result.indices, result.values / self._world_size)

        dist.barrier()
        start_s = time.perf_counter()
        self._lanes.run(recording.of(exchange()), "a sparse sum").wait()
        total_s = time.perf_counter() - start_s
        again = recording.again()
        dist.barrier()
        start_s = time.perf_counter()
        self._lanes.run(again, "its messages").wait()
        exchange_s = time.perf_counter() - start_s
        return Timing(total_s, recording.compute_s, exchange_s, recording.sent_bytes)

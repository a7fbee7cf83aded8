"""The cost model, measured by all ranks at the same time, as they would communicate; the slowest rank counts."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ddp_hooks.comm import (
    Algorithm,
    AlphaBeta,
    Lanes,
    LaneSettings,
    Partition,
    Recorder,
    Work,
    codec_of,
    run_on_fabric,
)
from ddp_hooks.comm.executors.slices import scatter_message_bytes
from ddp_hooks.comm.probe import shift
from ddp_hooks.comm.wire.exact import Arrived, PairMemory, encode, message_bytes
from ddp_hooks.planning.events import Slice, clock_of
from ddp_hooks.planning.measurement.processor import Progress, cpu_seconds, gather, oversubscription, seconds_of
from ddp_hooks.planning.network import Costs, Network, ring
from ddp_hooks.planning.strategies.in_backward import SparDL
from ddp_hooks.sparse import EntryCodec, SparseSum, Sparsity

_SIZES = (1 << 10, 16 << 10, 128 << 10, 512 << 10, 1 << 20, 4 << 20)  # bytes of the messages that are timed
_TRAIN_BYTES = 8 << 20  # sent in a row: links with burst credit let the first messages through unshaped
_MIN_MESSAGES, _MAX_MESSAGES = 4, 64  # in a row
_REPEATS = 3
_TOGETHER = 4  # collectives
_REDUCED_BYTES = 16 << 20
_COPY_BYTES = 32 << 20
_CODE_NUMEL = 256 << 10  # of a slice
_SELECT_NUMEL = 6 << 20  # as many as a group has
_MAX_SELECTING = 16  # workers whose selections are measured


@dataclass(frozen=True)
class LinkFit:
    """The alpha-beta model of a link, and its error."""

    link: AlphaBeta  #: seconds per message, and per byte
    burst_credit_s: float  #: part of a latency that the link makes up for, see :class:`~ddp_hooks.planning.Network`
    alpha_error_s: float  #: standard error
    error: float  #: largest relative deviation of a measured size from the model
    seconds: dict[int, float]  #: per message, by size in bytes

    def network(self, workers: int, native: bool = False) -> Network:
        """Return a network of so many workers with such links."""
        return Network(workers, self.link, native=native, burst_credit_s=self.burst_credit_s)

    def __str__(self) -> str:
        mb_s = 1e-6 / self.link.beta_s_per_byte if self.link.beta_s_per_byte else float("inf")
        return (
            f"{self.link.alpha_s * 1e6:.0f} ± {self.alpha_error_s * 1e6:.0f} microseconds per message, "
            f"{mb_s:.1f} MB/s (off by {self.error:.0%})"
        )


@dataclass(frozen=True)
class Measured:
    """The link between processes, and the costs of communication for their processor."""

    fit: LinkFit
    costs: Costs


def fit_link(seconds: dict[int, float]) -> LinkFit:
    """Fit a link to seconds per message, by size in bytes; neither latency nor seconds per byte are below zero.

    Seconds per byte are the least-squares slope through the larger half of the sizes. The latency is the median of what
    is left of the smaller half without their bytes. What large messages take less than both is the burst credit.

    Raises:
        ValueError: there are fewer than four sizes.
    """
    if len(seconds) < 4:
        raise ValueError(f"a line with its error takes four sizes or more, got {sorted(seconds)}")
    sizes, times = np.array(sorted(seconds), float), np.array([seconds[size] for size in sorted(seconds)])
    half = len(sizes) // 2
    beyond_s, beta = _line_above_zero(sizes[half:], times[half:])
    latencies = times[:half] - beta * sizes[:half]
    alpha = max(0.0, float(np.median(latencies)))
    credit_s = max(0.0, alpha - beyond_s)
    residuals = times - np.maximum(alpha, alpha + beta * sizes - credit_s)
    alpha_error = float(np.abs(latencies - alpha).mean() / np.sqrt(half))
    error = float((np.abs(residuals) / times).max())
    return LinkFit(AlphaBeta(alpha, beta), credit_s, alpha_error, error, dict(seconds))


def _line_above_zero(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Return intercept and slope by least squares, neither below zero."""
    slope = float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())
    intercept = float(y.mean() - slope * x.mean())
    if intercept < 0:
        return 0.0, float((x * y).sum() / (x * x).sum())
    return (intercept, slope) if slope > 0 else (float(y.mean()), 0.0)


def measure(group: dist.ProcessGroup, device: torch.device, progress: Progress = iter) -> Measured:
    """Measure the link between all ranks, and the processor; collective, takes seconds.

    Gradients are on ``device``; ``progress`` wraps the parts of the work, as ``tqdm`` does.

    Raises:
        ValueError: there is only one rank.
    """
    if dist.get_world_size(group) < 2:
        raise ValueError("one rank has no link to measure: start at least two, or describe the network")
    on_cpu = device.type == "cpu"
    lanes = Lanes(group, 1, device, LaneSettings(timeout_s=120.0), Recorder())
    try:
        per_core, cores = oversubscription(group)
        costs: dict[str, float] = {"python": per_core} if on_cpu else {}
        for part in progress(("link", "all-reduce", "messages", "copies", "selection")):
            if part == "link":
                fit = fit_link({size: _message_s(lanes, size, device) for size in _SIZES})
            elif part == "all-reduce":
                costs["all_reduce"] = _all_reduce_factor(lanes, fit, device)
            elif part == "messages" and on_cpu:
                costs |= {name: seconds * per_core for name, seconds in _message_costs(lanes, device).items()}
            elif part == "copies" and on_cpu:
                costs |= _pass_costs(group)
            elif part == "selection":
                costs["select_s_per_byte"] = _select_s_per_byte(group, device, lanes.world_size)
    finally:
        lanes.close()
    return Measured(fit, Costs(**costs, cores=cores, oversubscription=per_core))


def measure_alone(device: torch.device, workers: int) -> Costs:
    """Measure one of so many workers, in one process alone; not the cost of messages."""
    costs = _pass_costs(None) | {"python": 1.0} if device.type == "cpu" else {}
    return Costs(**costs, select_s_per_byte=_select_s_per_byte(None, device, workers), cores=1)


def _message_s(lanes: Lanes, num_bytes: int, device: torch.device) -> float:
    """Return the seconds of a round in which every rank sends to its right neighbour, among other such rounds."""
    rounds = min(_MAX_MESSAGES, max(_MIN_MESSAGES, _TRAIN_BYTES // num_bytes))
    outgoing, incoming = (torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))

    def run() -> None:
        lanes.run(shift(outgoing, incoming, lanes.rank, lanes.world_size, rounds), "a measurement of the link").wait()

    if num_bytes == _SIZES[0]:
        seconds_of(run, device)  # connects
    return _median_s(lanes.group, partial(seconds_of, run, device)) / rounds


def _all_reduces(lanes: Lanes, device: torch.device) -> Callable[[], None]:
    """Return a function that runs two all-reduces of the backend at once; it has run once."""
    gradients = [torch.zeros(_REDUCED_BYTES // 4, device=device) for _ in range(2)]

    def run() -> None:
        for work in [dist.all_reduce(gradient, group=lanes.group, async_op=True) for gradient in gradients]:
            assert work is not None  # None is for ranks outside the group
            work.wait()

    seconds_of(run, device)  # connects
    return run


def _all_reduce_factor(lanes: Lanes, fit: LinkFit, device: torch.device) -> float:
    """Return the time of two all-reduces of the backend, relative to two rings on this link; at least 1."""
    rounds = 2 * ring(lanes.world_size, 1, _REDUCED_BYTES)
    streams = 1 if lanes.native else 2
    expected_s = clock_of([Slice(rounds)] * (2 // streams), fit.network(lanes.world_size), streams)
    found_s = _median_s(lanes.group, partial(seconds_of, _all_reduces(lanes, device), device))
    return max(1.0, found_s / expected_s) if expected_s else 1.0


def _message_costs(lanes: Lanes, device: torch.device) -> dict[str, float]:
    """Return the processor seconds of a message and of bytes, sent and received, with and without sums."""
    # Whole collectives: a message of its own costs less than a message of a slice that waits for others.
    workers = lanes.world_size
    small, large = 1 << 17, _REDUCED_BYTES  # messages limit the small one, bytes the large one
    gathering_s = {size: _collectives_cpu_s(lanes, lanes.all_gather, size) for size in (small, large)}
    scattering_s = _collectives_cpu_s(lanes, lanes.reduce_scatter, large)
    slice_bytes = LaneSettings().slice_bytes
    count = {size: (workers - 1) * -(-size // workers // slice_bytes) for size in (small, large)}
    sent = {size: size * (workers - 1) / workers for size in (small, large)}
    scatter_count = (workers - 1) * -(-large // workers // scatter_message_bytes(slice_bytes, workers - 1))
    # Two equations: seconds = messages * message_s + bytes * byte_s, for each size.
    ratio = count[large] / count[small]
    byte_s = max(0.0, (gathering_s[large] - ratio * gathering_s[small]) / (sent[large] - ratio * sent[small]))
    message_s = max(0.0, gathering_s[small] - byte_s * sent[small]) / count[small]
    adding_s = scattering_s - gathering_s[large] - (scatter_count - count[large]) * message_s
    all_reducing_s = cpu_seconds(lanes.group, _all_reduces(lanes, device), _REPEATS)
    return {
        "message_s": message_s,
        "byte_s": byte_s,
        "scatter_byte_s": byte_s + max(0.0, adding_s) / sent[large],
        "all_reduce_byte_s": max(0.0, all_reducing_s - 4 * (workers - 1) * message_s) / (4 * sent[large]),
    }


def _collectives_cpu_s(lanes: Lanes, collective: Callable[[list[Partition], str], Work], num_bytes: int) -> float:
    flat = torch.zeros(num_bytes // 4)
    part = flat.numel() // lanes.world_size
    partition = Partition(flat, (*(rank * part for rank in range(lanes.world_size)), flat.numel()))

    def run() -> None:
        for work in [collective([partition], "a measurement of the processor") for _ in range(_TOGETHER)]:
            work.wait()

    return cpu_seconds(lanes.group, run, _REPEATS) / _TOGETHER


def _pass_costs(group: dist.ProcessGroup | None) -> dict[str, float]:
    """Return the seconds per byte of passes over gradients: of a copy, and of codes, slice by slice."""
    source = torch.randn(_COPY_BYTES // 4, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    target, slices = torch.zeros_like(source), source.split(_CODE_NUMEL)
    memory, codec = PairMemory(), codec_of("int8", None, source.dtype)
    assert codec is not None
    message = torch.empty(message_bytes(_CODE_NUMEL, memory), dtype=torch.uint8)
    payload = torch.empty(codec.nbytes(_CODE_NUMEL), dtype=torch.uint8)
    received = torch.empty(_CODE_NUMEL)

    def code_exactly() -> None:
        for values in slices:
            encode(values, memory, message)
            Arrived.of(message, _CODE_NUMEL, memory).decode(received)

    def code() -> None:
        for values, residual in zip(slices, target.split(_CODE_NUMEL), strict=True):
            codec.encode_with_residual(values, residual, payload)
            codec.decode(payload, received)

    passes = {"copy": lambda: target.copy_(source), "exact": code_exactly, "code": code}
    return {
        f"{name}_s_per_byte": _median_s(group, partial(seconds_of, action, source.device)) / _COPY_BYTES
        for name, action in passes.items()
    }


def _select_s_per_byte(group: dist.ProcessGroup | None, device: torch.device, workers: int) -> float:
    """Return what a worker computes in SparDL's all-reduce, measured with all workers in this process."""
    workers = min(workers, _MAX_SELECTING)
    gradient = torch.randn(_SELECT_NUMEL, generator=torch.Generator().manual_seed(0)).to(device)
    gradients = [gradient.roll(rank * _SELECT_NUMEL // workers) for rank in range(workers)]
    sparsity = Sparsity("spardl", round(SparDL.density * _SELECT_NUMEL), EntryCodec("compact", gradient.dtype))
    dense = torch.empty_like(gradient)

    def exchange(rank: int, residual: Tensor) -> Algorithm:
        total = yield from SparseSum(sparsity, _SELECT_NUMEL, rank, workers).run(residual, gradients[rank])
        dense.zero_()
        dense[total.indices] = total.values

    def select_s() -> float:
        exchanges = [exchange(rank, torch.zeros_like(gradient)) for rank in range(workers)]
        return seconds_of(partial(run_on_fabric, exchanges), device) / workers

    select_s()  # the first one allocates
    return _median_s(group, select_s) / (4 * _SELECT_NUMEL)


def _median_s(group: dist.ProcessGroup | None, timed: Callable[[], float]) -> float:
    """Return the median seconds, as ``timed`` returns them, of the slowest rank."""
    seconds = []
    for _ in range(_REPEATS):
        if group is not None:
            dist.barrier(group)
        seconds.append(max(gather(timed(), group)))
    return statistics.median(seconds)

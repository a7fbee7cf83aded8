"""The cost model, measured on the processes that are there: links, messages, and what the processor does for them.

Everything here is collective: all ranks measure at the same time, as they would communicate, and the slowest counts.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ddp_hooks.comm import Algorithm, AlphaBeta, Lanes, LaneSettings, Partition, Recorder, Recv, Send, Work
from ddp_hooks.comm.executors.slices import scatter_message_bytes
from ddp_hooks.planning.events import Slice, clock_of
from ddp_hooks.planning.network import Network
from ddp_hooks.planning.patterns import all_reduce
from ddp_hooks.planning.processor import cpu_seconds
from ddp_hooks.planning.simulation import Costs

SIZES = (1 << 10, 16 << 10, 128 << 10, 512 << 10, 1 << 20, 4 << 20)
"""Bytes of the messages that are timed."""

_TRAIN_BYTES = 8 << 20  # sent one after the other: links that save up let the first ones through unshaped
_FEWEST, _MOST = 4, 64  # messages of a train
_REPEATS = 3
_TOGETHER = 4  # collectives
_REDUCED_BYTES = 16 << 20
_COPY_BYTES = 32 << 20
_SELECT_NUMEL = 6 << 20  # as many as a group has


@dataclass(frozen=True)
class LinkFit:
    """The alpha-beta model of a link, and how well it fits.

    Args:
        link: seconds per message, and per byte.
        credit_s: how much of a latency the link makes up for, see :class:`~ddp_hooks.planning.Network`.
        alpha_error_s, beta_error_s_per_byte: how sure the two are.
        error: the largest deviation of a measured size from the line, relative.
        seconds: per message, by size in bytes.
    """

    link: AlphaBeta
    credit_s: float
    alpha_error_s: float
    beta_error_s_per_byte: float
    error: float
    seconds: dict[int, float]

    def network(self, workers: int, native: bool = False) -> Network:
        """So many workers behind such links."""
        return Network(workers, self.link, native=native, credit_s=self.credit_s)

    def __str__(self) -> str:
        mb_s = 1e-6 / self.link.beta_s_per_byte if self.link.beta_s_per_byte else float("inf")
        return (
            f"{self.link.alpha_s * 1e6:.0f} ± {self.alpha_error_s * 1e6:.0f} microseconds per message, "
            f"{mb_s:.1f} MB/s (fits to {self.error:.0%})"
        )


@dataclass(frozen=True)
class Measured:
    """What a planner knows of processes: their link, and what communication costs the processor."""

    fit: LinkFit
    costs: Costs


def fit_link(seconds: dict[int, float]) -> LinkFit:
    """Seconds per byte where bytes decide, and per message where messages do; none of them below zero.

    The slope is that of least squares through the larger half of the sizes; what the smaller half takes beyond its
    bytes is the latency, by its median. Large messages may take less than both together: a link that saves up while it
    is idle makes up for latencies then, and what is missing is its credit.

    Args:
        seconds: per message, by its size in bytes; at least four sizes.
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
    spread = ((sizes[half:] - sizes[half:].mean()) ** 2).sum()
    beta_error = float(np.sqrt((residuals[half:] ** 2).sum() / max(1, len(sizes) - half - 2) / spread))
    alpha_error = float(np.abs(latencies - alpha).mean() / np.sqrt(half))
    error = float((np.abs(residuals) / times).max())
    return LinkFit(AlphaBeta(alpha, beta), credit_s, alpha_error, beta_error, error, dict(seconds))


def _line_above_zero(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Intercept and slope by least squares, neither below zero."""
    slope = float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())
    intercept = float(y.mean() - slope * x.mean())
    if intercept < 0:
        return 0.0, float((x * y).sum() / (x * x).sum())
    return (intercept, slope) if slope > 0 else (float(y.mean()), 0.0)


def measure(
    group: dist.ProcessGroup,
    device: torch.device,
    select_s: Callable[[Tensor], float] | None = None,
    progress: Callable[[Sequence[str]], Iterable[str]] = iter,
) -> Measured:
    """Measure the link between all ranks, and the processor; collective, takes seconds.

    Args:
        group: the ranks, at least two.
        device: where gradients are.
        select_s: seconds that one worker computes for a sparse all-reduce of a gradient, (n,) float32; see
            :func:`ddp_hooks.topk.rehearsal.compute_s`. None: nobody asks for that.
        progress: wraps the parts of the work, as ``tqdm`` does.

    Raises:
        ValueError: there is only one rank.
    """
    if dist.get_world_size(group) < 2:
        raise ValueError("one rank has no link to measure: start at least two, or describe the network")
    lanes = Lanes(group, 1, device, LaneSettings(timeout_s=120.0), Recorder())
    try:
        costs: dict[str, float] = {}
        fit: LinkFit | None = None
        for part in progress(("link", "all-reduce", "messages", "copies", "selection")):
            if part == "link":
                fit = fit_link({size: _message_s(lanes, size, device) for size in SIZES})
            elif part == "all-reduce":
                assert fit is not None
                costs["all_reduce"] = _all_reduce_factor(lanes, fit, device)
            elif part == "messages" and device.type == "cpu":
                costs |= _message_costs(lanes, device)
            elif part == "copies" and device.type == "cpu":
                costs["copy_s_per_byte"] = _copy_s_per_byte(group)
            elif part == "selection" and select_s is not None:
                costs["select_s_per_byte"] = _select_s_per_byte(group, device, select_s)
    finally:
        lanes.close()
    assert fit is not None
    crowd, cores = _crowd(group)
    if device.type == "cpu":
        costs = {name: value * (crowd if name in _CPU_SECONDS else 1) for name, value in costs.items()}
        costs["python"] = crowd
    return Measured(fit, Costs(**costs, cores=cores, crowd=crowd))


def measure_alone(device: torch.device, select_s: Callable[[Tensor], float] | None = None) -> Costs:
    """What one process can measure of a processor that it does not share: copies and selection.

    What messages cost it is not among them.

    Args:
        device: where gradients are.
        select_s: as of :func:`measure`.
    """
    on_cpu = device.type == "cpu"
    return Costs(
        copy_s_per_byte=_copy_s_per_byte(None) if on_cpu else 0.0,
        select_s_per_byte=_select_s_per_byte(None, device, select_s) if select_s is not None else 0.0,
        python=1.0 if on_cpu else 0.0,
    )


# Measured in seconds of a processor, the others by the clock.
_CPU_SECONDS = ("message_s", "byte_s", "scatter_byte_s", "all_reduce_byte_s")


def _shift(outgoing: Tensor, incoming: Tensor, rank: int, world_size: int, rounds: int) -> Algorithm:
    for _ in range(rounds):
        yield [Recv((rank - 1) % world_size, incoming), Send((rank + 1) % world_size, outgoing)]


def _shift_all(lanes: Lanes, num_bytes: int, device: torch.device, rounds: int) -> Callable[[], None]:
    outgoing, incoming = (torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))

    def run() -> None:
        lanes.run(_shift(outgoing, incoming, lanes.rank, lanes.world_size, rounds), "a measurement of the link").wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return run


def _message_s(lanes: Lanes, num_bytes: int, device: torch.device) -> float:
    """Seconds of a round in which every rank sends to its right neighbour, behind other such rounds."""
    rounds = min(_MOST, max(_FEWEST, _TRAIN_BYTES // num_bytes))
    run = _shift_all(lanes, num_bytes, device, rounds)
    if num_bytes == SIZES[0]:
        run()  # connects
    return statistics.median(_slowest_s(lanes.group, run) for _ in range(_REPEATS)) / rounds


def _all_reduces(lanes: Lanes, device: torch.device) -> Callable[[], None]:
    """Two all-reduces of the backend, both under way at once; they have run once."""
    gradients = [torch.zeros(_REDUCED_BYTES // 4, device=device) for _ in range(2)]

    def run() -> None:
        for work in [dist.all_reduce(gradient, group=lanes.group, async_op=True) for gradient in gradients]:
            assert work is not None  # None is for ranks outside the group
            work.wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    run()
    return run


def _all_reduce_factor(lanes: Lanes, fit: LinkFit, device: torch.device) -> float:
    """How many times as long as two rings on this link two all-reduces of the backend take."""
    run = _all_reduces(lanes, device)
    pattern = all_reduce("ring", lanes.world_size, 1, _REDUCED_BYTES)
    streams = 1 if lanes.native else 2
    expected_s = clock_of([Slice(pattern)] * (2 // streams), fit.network(lanes.world_size), streams)
    found_s = statistics.median(_slowest_s(lanes.group, run) for _ in range(_REPEATS))
    return max(1.0, found_s / expected_s) if expected_s else 1.0


def _message_costs(lanes: Lanes, device: torch.device) -> dict[str, float]:
    """Processor seconds of a message, and of bytes, both sent and received; of bytes that are added up, too.

    They are those of whole collectives: a message of its own costs less than one of a slice that waits for others.
    """
    workers = lanes.world_size
    small, large = 1 << 17, _REDUCED_BYTES  # messages decide, and bytes do
    gathering_s = {size: _collectives_cpu_s(lanes, lanes.all_gather, size) for size in (small, large)}
    scattering_s = _collectives_cpu_s(lanes, lanes.reduce_scatter, large)
    slice_bytes = LaneSettings().slice_bytes
    count = {size: (workers - 1) * -(-size // workers // slice_bytes) for size in (small, large)}
    sent = {size: size * (workers - 1) / workers for size in (small, large)}
    scatter_count = (workers - 1) * -(-large // workers // scatter_message_bytes(slice_bytes, workers - 1))
    # Two equations: so many messages and so many bytes take so many seconds.
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
    """Processor seconds of a collective, behind others."""
    flat = torch.zeros(num_bytes // 4)
    part = flat.numel() // lanes.world_size
    partition = Partition(flat, (*(rank * part for rank in range(lanes.world_size)), flat.numel()))

    def run() -> None:
        for work in [collective([partition], "a measurement of the processor") for _ in range(_TOGETHER)]:
            work.wait()

    return cpu_seconds(lanes.group, run, _REPEATS) / _TOGETHER


def _copy_s_per_byte(group: dist.ProcessGroup | None) -> float:
    source, target = torch.ones(_COPY_BYTES // 4), torch.ones(_COPY_BYTES // 4)
    return statistics.median(_slowest_s(group, lambda: target.copy_(source)) for _ in range(_REPEATS)) / _COPY_BYTES


def _select_s_per_byte(
    group: dist.ProcessGroup | None, device: torch.device, select_s: Callable[[Tensor], float]
) -> float:
    gradient = torch.randn(_SELECT_NUMEL, generator=torch.Generator().manual_seed(0)).to(device)
    seconds = []
    for _ in range(1 + _REPEATS):
        _meet(group)
        seconds.append(_over_ranks(group, select_s(gradient), max))
    return statistics.median(seconds[1:]) / (4 * _SELECT_NUMEL)


def _meet(group: dist.ProcessGroup | None) -> None:
    if group is not None:
        dist.barrier(group)


def _slowest_s(group: dist.ProcessGroup | None, action: Callable[[], object]) -> float:
    _meet(group)
    start_s = time.perf_counter()
    action()
    return _over_ranks(group, time.perf_counter() - start_s, max)


def _over_ranks(group: dist.ProcessGroup | None, value: float, combine: Callable[[list[float]], float]) -> float:
    if group is None:
        return value
    gathered: list[float] = [0.0] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return combine(gathered)


def _crowd(group: dist.ProcessGroup) -> tuple[float, int]:
    """Workers per core of this host, at least 1; and whole cores per worker, at least 1; the same on all ranks."""
    hosts: list[tuple[str, int]] = [("", 0)] * dist.get_world_size(group)
    dist.all_gather_object(hosts, (socket.gethostname(), len(os.sched_getaffinity(0))), group=group)
    names = [name for name, _ in hosts]
    crowd = max(names.count(name) / cores for name, cores in hosts)
    return max(1.0, crowd), max(1, int(1 / crowd))

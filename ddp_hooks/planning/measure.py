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

from ddp_hooks.comm import Algorithm, AlphaBeta, Lanes, LaneSettings, Recorder, Recv, Send
from ddp_hooks.planning.events import Slice, clock_of
from ddp_hooks.planning.network import Network
from ddp_hooks.planning.patterns import all_reduce
from ddp_hooks.planning.simulation import Costs

SIZES = (1 << 10, 16 << 10, 128 << 10, 512 << 10, 1 << 20, 4 << 20)
"""Bytes of the messages that are timed."""

_TRAIN_BYTES = 8 << 20  # sent one after the other: links that save up let the first ones through unshaped
_FEWEST, _MOST = 4, 64  # messages of a train
_REPEATS = 3
_ALL_REDUCE_BYTES = 16 << 20
_COPY_BYTES = 32 << 20
_SELECT_NUMEL = 1 << 20


@dataclass(frozen=True)
class LinkFit:
    """The alpha-beta model of a link, and how well it fits.

    Args:
        link: seconds per message, and per byte.
        alpha_error_s, beta_error_s_per_byte: how sure the two are.
        error: the largest deviation of a measured size from the line, relative.
        seconds: per message, by size in bytes.
    """

    link: AlphaBeta
    alpha_error_s: float
    beta_error_s_per_byte: float
    error: float
    seconds: dict[int, float]

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

    The slope is that of least squares, in which the large messages count most; what the smaller half of them takes
    beyond their bytes is the latency, by its median. A link that lets short bursts through faster would bend a line
    that is fitted to everything alike.

    Args:
        seconds: per message, by its size in bytes; at least three sizes.
    """
    if len(seconds) < 3:
        raise ValueError(f"a line with its error takes three sizes or more, got {sorted(seconds)}")
    sizes, times = np.array(sorted(seconds), float), np.array([seconds[size] for size in sorted(seconds)])
    spread = ((sizes - sizes.mean()) ** 2).sum()
    beta = max(0.0, float(((sizes - sizes.mean()) * (times - times.mean())).sum() / spread))
    beyond = (times - beta * sizes)[: (len(sizes) + 1) // 2]
    alpha = max(0.0, float(np.median(beyond)))
    residuals = times - alpha - beta * sizes
    beta_error = float(np.sqrt((residuals**2).sum() / (len(sizes) - 2) / spread))
    alpha_error = float(np.abs(beyond - alpha).mean() / np.sqrt(len(beyond)))
    error = float((np.abs(residuals) / times).max())
    return LinkFit(AlphaBeta(alpha, beta), alpha_error, beta_error, error, dict(seconds))


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
                costs["all_reduce"] = _all_reduce_factor(lanes, fit.link, device)
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


_CPU_SECONDS = ("message_s", "byte_s")  # measured in seconds of a processor, the others by the clock


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


def _all_reduce_factor(lanes: Lanes, link: AlphaBeta, device: torch.device) -> float:
    """How many times as long as two rings on this link two all-reduces of the backend take, both under way at once."""
    gradients = [torch.zeros(_ALL_REDUCE_BYTES // 4, device=device) for _ in range(2)]

    def run() -> None:
        for work in [dist.all_reduce(gradient, group=lanes.group, async_op=True) for gradient in gradients]:
            assert work is not None  # None is for ranks outside the group
            work.wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    run()
    pattern = all_reduce("ring", lanes.world_size, 1, _ALL_REDUCE_BYTES)
    streams = 1 if lanes.native else 2
    expected_s = clock_of([Slice(pattern)] * (2 // streams), Network(lanes.world_size, link), streams)
    found_s = statistics.median(_slowest_s(lanes.group, run) for _ in range(_REPEATS))
    return max(1.0, found_s / expected_s) if expected_s else 1.0


def _message_costs(lanes: Lanes, device: torch.device) -> dict[str, float]:
    """Processor seconds of a message, and of its bytes, both sent and received."""
    small, large = 1 << 10, 1 << 20
    rounds = {small: 8 * _MOST, large: 16}
    per_message = {
        size: _cpu_s(lanes.group, _shift_all(lanes, size, device, count)) / count for size, count in rounds.items()
    }
    return {
        "message_s": per_message[small],
        "byte_s": max(0.0, (per_message[large] - per_message[small]) / (large - small)),
    }


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


def _cpu_s(group: dist.ProcessGroup, action: Callable[[], object]) -> float:
    action()
    dist.barrier(group)
    start_s = time.process_time()
    action()
    return _over_ranks(group, time.process_time() - start_s, statistics.mean)


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

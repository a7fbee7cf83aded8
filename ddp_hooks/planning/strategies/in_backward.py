"""Strategies that reduce gradients under the backward, all of them before the optimizer: DDP, and two lossy ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ddp_hooks.comm import CodecName, codec_of, mebibytes
from ddp_hooks.comm.algorithms.bruck import all_gather_steps, reduce_scatter_steps
from ddp_hooks.planning.events import Process, Signal, SimulatedLane, Slice
from ddp_hooks.planning.network import Round, Rounds, ring
from ddp_hooks.planning.simulation import Run, Strategy

_GLOO_THREADS = 2  # of a process group
_MANY = 1024  # elements, of whole blocks
_QUANTIZED_SLICE_BYTES = 1 << 20  # of ddp_hooks.quantized
_FIRST_BUCKET_BYTES = 1 << 20  # torch.distributed._DEFAULT_FIRST_BUCKET_BYTES
# Seconds per tensor and step that the training thread computes for hooks, beyond a step without DDP: the slope from 100
# to 600 small linear layers on two ranks.
DDP_HOOK_S = 5e-6
_SPARDL_HOOK_S = 15e-6  # by the clock instead of the thread


@dataclass(frozen=True)
class Ddp(Strategy):
    """DistributedDataParallel: buckets, all-reduced under the backward; the optimizer waits for all of them."""

    bucket_mb: float = 25.0  #: ``bucket_cap_mb``; the first bucket is closed at 1 MB

    @property
    def name(self) -> str:
        return f"DDP, {self.bucket_mb:g} MB"

    @property
    def line(self) -> str:
        return f"DistributedDataParallel(model, bucket_cap_mb={self.bucket_mb:g})"

    def train(self, run: Run) -> Process:
        lanes = run.lanes(1 if run.network.native else _GLOO_THREADS, window=1)
        buckets = ddp_buckets(run, self.bucket_mb)
        yield from reduce_in_backward(run, buckets, lanes, partial(self.all_reduce, run), "all-reduce", DDP_HOOK_S)

    def all_reduce(self, run: Run, num_bytes: float) -> list[Slice]:
        return run.all_reduce(num_bytes)


@dataclass(frozen=True)
class Quantized(Strategy):
    """QuantizedState with 8 bits: encoded gradients to their owners, and encoded means back, under the backward."""

    bucket_mb: float = 5.0  #: of DDP
    lanes: int = 2  #: streams of communication

    @property
    def name(self) -> str:
        return "Quantized, int8"

    @property
    def line(self) -> str:
        return (
            f"ddp = DistributedDataParallel(model, bucket_cap_mb={self.bucket_mb:g})\n"
            f"state = QuantizedState(ddp, QuantizedConfig(bits=8))\n"
            f"ddp.register_comm_hook(state, quantized_hook)\n"
            f"state.state_dict()  # what rounding took on this rank: every rank saves its own, beside the checkpoint"
        )

    @property
    def effect(self) -> str:
        return (
            "It rounds gradients and their means to 8 bits, and adds what rounding took to the next gradients: check "
            "that your model learns as well (docs/fewer_bytes.md)."
        )

    def train(self, run: Run) -> Process:
        buckets = ddp_buckets(run, self.bucket_mb)
        yield from reduce_in_backward(
            run, buckets, run.lanes(self.lanes), partial(self.all_reduce, run), "encoded all-reduce", DDP_HOOK_S
        )

    def all_reduce(self, run: Run, num_bytes: float) -> list[Slice]:
        """Return slices each of which is scattered, then gathered."""
        network, costs = run.network, run.costs
        width, code_s = coded_width("int8", run.step.element_bytes), costs.code_s_per_byte * num_bytes
        scatters = run.collective("reduce-scatter", num_bytes, _QUANTIZED_SLICE_BYTES, width, code_s)
        gathered = ring(network.workers, network.node_size, width * num_bytes / len(scatters))
        return [
            Slice((*each.rounds, *gathered), 2 * each.work_s, byte_s=(byte_s + costs.byte_s) / 2)  # one half adds
            for each in scatters
            if (byte_s := each.byte_s) is not None
        ]


@dataclass(frozen=True)
class SparDL(Strategy):
    """SparDL with one team: Spar-Reduce-Scatter, then Bruck's all-gather, per group, under the backward."""

    density: float = 0.01  #: selected part of the elements
    group_mb: float = 25.0  #: gradients from which entries are selected together, in MiB
    lanes: int = 2  #: streams of communication
    entry_bytes: int = 4  #: of an index and a value in the compact format

    @property
    def name(self) -> str:
        return f"SparDL, {self.density:.3g}"

    @property
    def line(self) -> str:
        return (
            f"ddp = DistributedDataParallel(model, bucket_cap_mb=5, gradient_as_bucket_view=True)\n"
            f"state = TopKState(ddp, TopKConfig(density={self.density:g}))\n"
            f"ddp.register_comm_hook(state, topk_hook)\n"
            f"state.state_dict()  # what this rank has left out: every rank saves its own, beside the checkpoint"
        )

    @property
    def effect(self) -> str:
        return "It leaves gradients for later steps: check that your model learns as well (docs/sparse.md)."

    def rounds(self, workers: int, num_elements: float) -> Rounds:
        """Return the rounds of a group: of each block at most its share of the entries is sent."""
        share_bytes = self.density * num_elements / workers * self.entry_bytes
        steps = [*reduce_scatter_steps(0, workers), *all_gather_steps(0, workers)]
        return tuple(Round(1, len(step.outgoing) * share_bytes) for step in steps)

    def train(self, run: Run) -> Process:
        if run.network.node_size > 1:
            raise ValueError("SparDL is simulated on one level only: give a network with node_size=1")

        def sparse_all_reduce(num_bytes: float) -> list[Slice]:
            rounds = self.rounds(run.network.workers, num_bytes / run.step.element_bytes)
            return [Slice(rounds, run.costs.select_s_per_byte * num_bytes)]

        tensors = run.step.tensors
        limit = mebibytes(self.group_mb)
        groups = group_by_size(run.step.backward_order, lambda tensor: tensors[tensor].num_bytes, limit)
        lanes = run.lanes(self.lanes)
        yield from reduce_in_backward(run, groups, lanes, sparse_all_reduce, "sparse all-reduce", _SPARDL_HOOK_S)


def coded_width(wire: CodecName, element_bytes: int) -> float:
    """Return the bytes of a code, scales included, per byte of a tensor; at most 1."""
    codec = codec_of(wire, None, torch.float32)
    return 1.0 if codec is None else min(1.0, codec.nbytes(_MANY) / (_MANY * element_bytes))


def reduce_in_backward(
    run: Run,
    groups: Sequence[Sequence[int]],
    lanes: Sequence[SimulatedLane],
    collective: Callable[[float], list[Slice]],
    what: str,
    hook_s: float,
) -> Process:
    """Train with a collective per group, in the order of gradients; ``collective(num_bytes)`` gives its slices."""
    reduced: list[Signal] = []

    def launch(number: int) -> None:
        slices = collective(run.num_bytes(groups[number]))
        reduced.append(lanes[number % len(lanes)].submit(slices, f"{what} of group {number}"))

    while not run.is_over:
        yield from run.forward({})
        reduced.clear()
        yield from run.backward(launcher(groups, launch), hook_s)
        yield from run.wait_all(reduced, f"{what}s")
        yield from run.optimizer()
        run.end_step()


def ddp_buckets(run: Run, bucket_mb: float, order: Iterable[int] | None = None) -> list[list[int]]:
    """Return DDP's buckets after its first step: tensors in the order of the backward; a full bucket is closed."""
    limit = min(_FIRST_BUCKET_BYTES, mebibytes(bucket_mb))
    buckets: list[list[int]] = [[]]
    total = 0
    for tensor in run.step.backward_order if order is None else order:
        if total >= limit:
            buckets.append([])
            total, limit = 0, mebibytes(bucket_mb)
        buckets[-1].append(tensor)
        total += run.step.tensors[tensor].num_bytes
    return buckets


def group_by_size(items: Iterable[int], size_of: Callable[[int], int], limit: int) -> list[list[int]]:
    """Group neighbours whose total is at most ``limit`` bytes; a larger item is alone (DeAR, section IV-B)."""
    groups: list[list[int]] = []
    total = 0
    for item in items:
        total += size_of(item)
        if not groups or total > limit:
            groups.append([])
            total = size_of(item)
        groups[-1].append(item)
    return groups


def launcher(groups: Sequence[Sequence[int]], launch: Callable[[int], None]) -> Callable[[int], None]:
    """Return a function that takes ready gradients and launches each group when all of its gradients are ready."""
    groups_of: dict[int, list[int]] = {}
    for number, group in enumerate(groups):
        for tensor in group:
            groups_of.setdefault(tensor, []).append(number)
    missing = [len(group) for group in groups]

    def ready(tensor: int) -> None:
        for number in groups_of.get(tensor, ()):
            missing[number] -= 1
            if not missing[number]:
                launch(number)

    return ready
